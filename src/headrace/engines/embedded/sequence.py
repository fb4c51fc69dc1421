"""One request on its way through the engine: its tokens so far, how many of them the cache holds, and what was sent.

The records of a sampled token (log-probability, version) are written once, when it is sampled, and survive preemption
and a swap of weights.
"""

from __future__ import annotations

import numpy as np

from headrace.engines.base import Delta, FinishReason, Request
from headrace.types import Float32Array, Int32Array

PrefixKey = tuple[str, bytes]
"""A group and the prompt that its requests share."""


class Sequence:
    """A request, the tokens sampled for it, and its place in the cache."""

    def __init__(self, request: Request, order: int) -> None:
        prompt = np.asarray(request.token_ids, np.int32)
        self.request = request
        self.sampling = request.sampling
        self.rank = (request.priority, order)
        """Lower is served first and preempted last."""
        self.prompt_length = len(prompt)
        self.tokens: list[int] = prompt.tolist()
        """The prompt and everything sampled."""
        # All but the last prompt token can be shared: that one gives the logits of the first sampled token.
        shareable = bool(request.group) and len(prompt) > 1
        self.key: PrefixKey | None = (request.group, prompt.tobytes()) if shareable else None

        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.kv_version = -1
        """The version under which its keys and values were begun."""

        self.flushed_at: float | None = None
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sent = 0

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        return len(self._logprobs)

    @property
    def unsent(self) -> int:
        """How many sampled tokens no delta holds yet."""
        return len(self._logprobs) - self._sent

    def append(self, token: int, logprob: float, version: int) -> None:
        """Record a sampled token."""
        self.tokens.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)

    def delta(self, finish: FinishReason | None = None, error: str = "") -> Delta:
        """The tokens that were not sent before; they count as sent from here on."""
        first, self._sent = self._sent, len(self._logprobs)
        token_ids: Int32Array = np.array(self.tokens[self.prompt_length + first :], np.int32)
        logprobs: Float32Array = np.array(self._logprobs[first:], np.float32)
        versions: Int32Array = np.array(self._versions[first:], np.int32)
        return Delta(id=self.id, token_ids=token_ids, logprobs=logprobs, versions=versions, finish=finish, error=error)
