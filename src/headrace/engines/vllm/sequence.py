"""One request of a vLLM engine with its tokens so far, however many times it was sent to the server.

A request that is recalled continues from its last token. Tokens that were handed out are never drawn again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.engines.base import Delta, FinishReason, Request
from headrace.engines.vllm.client import AnswerPiece
from headrace.engines.vllm.sampling import first_stop

_FINISHES: dict[str, FinishReason] = {"length": "length", "stop": "stop"}

Cut = Literal["", "recall", "abort"]
"""Why a stream is ended from our side. `recall`: the request continues later. `abort`: the request ends."""


@dataclass(eq=False)
class VllmSequence:
    """A request and the tokens that were sampled for it."""

    request: Request
    order: int
    """The order of submission. Requests of equal priority are served in this order, also after a recall."""
    sampled: list[int] = field(default_factory=list)
    finished: bool = False
    """Whether the last delta was handed out."""
    cut: Cut = ""
    failures: int = 0
    """The number of streams that broke since the last token."""
    server_id: str = ""
    """The server's id of the stream that is open now."""
    task: asyncio.Task[None] | None = None

    def __lt__(self, other: VllmSequence) -> bool:
        return (self.request.priority, self.order) < (other.request.priority, other.order)

    @property
    def length(self) -> int:
        """The number of tokens, prompt included."""
        return len(self.request.token_ids) + len(self.sampled)

    def room(self, max_length: int) -> int:
        """Return how many tokens may still be sampled."""
        return min(self.request.sampling.max_tokens - len(self.sampled), max_length - self.length)

    def take(self, piece: AnswerPiece, version: int) -> Delta | None:
        """Add a piece and return the next delta, or None if there is nothing new.

        `finish` is set if a stop that we or the server found, or the length limit, ends the answer.
        """
        known = len(self.sampled)
        self.sampled += piece.token_ids
        end = first_stop(self.sampled, known, self.request.sampling)
        finish: FinishReason | None = _FINISHES.get(piece.finish or "")
        if end is not None:
            del self.sampled[end:]
            finish = "stop"
        self.finished = finish is not None
        count = len(self.sampled) - known
        if count:
            self.failures = 0
        if not count and finish is None:
            return None
        return self.delta(piece.token_ids[:count], piece.logprobs[:count], version, finish)

    def delta(
        self,
        token_ids: list[int],
        logprobs: list[float],
        version: int,
        finish: FinishReason | None = None,
        error: str = "",
    ) -> Delta:
        """Make a delta of this request."""
        return Delta(
            id=self.request.id,
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.full(len(token_ids), version, np.int32),
            finish=finish,
            error=error,
        )

    def ended(self, finish: FinishReason, error: str = "") -> Delta:
        """Make a last delta without tokens."""
        return self.delta([], [], -1, finish, error)
