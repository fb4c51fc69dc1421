"""What an episode is and is to do, what it needs of a chat format, and the seed of a rollout.

A chat format turns *new* messages into tokens to append; it is never asked to render a conversation again, so the
tokens of an earlier turn stay the ones that were sampled.
"""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.engines.base import Sampling
from headrace.scoring.base import Turn
from headrace.types import Int32Array, Prompt, Rollout, Trace

T = TypeVar("T")


class ChatFormat(Protocol):
    """Messages to tokens and back, for one model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the model ends its turn."""
        ...

    def open(self, messages: Sequence[dict[str, str]]) -> Int32Array:
        """The tokens of the opening messages, up to where the policy's first turn begins."""
        ...

    def continue_(self, messages: Sequence[dict[str, str]], *, ended: bool) -> Int32Array:
        """The tokens to append after the policy's turn: these messages, up to where its next turn begins.

        `ended` says whether the policy closed its turn itself; if not, the end of the turn is part of the answer.
        """
        ...

    def encode(self, text: str) -> Int32Array:
        """The tokens of a text, as it is."""
        ...

    def token_id(self, token: str) -> int:
        """The id of a token that is in the vocabulary as a whole."""
        ...

    def decode(self, token_ids: Int32Array) -> str:
        """The text of these tokens, for scorers and people."""
        ...


class Cancelled(Exception):
    """An episode was told to end."""


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """What one episode is to do."""

    id: str
    index: int
    """Its place in its group."""
    prompt: Prompt
    sampling: Sampling
    """`max_tokens` is the budget over all turns."""
    group: str = ""
    priority: int = 0
    max_turns: int = 1
    keep_routing: bool = False
    prefix: Trace | None = None
    """Tokens of an earlier attempt, opening included, that the first turn goes on from as they are."""
    saved: Sequence[Trace] = ()
    """The traces that this episode had come to in a previous process, a prefix included. The turns of a single trace
    are taken as they are and told to the environment again, as long as the environment answers as it did. An episode
    that cannot go on from its traces begins again, and counts their tokens as `discarded`."""
    deadline: float | None = None
    """Seconds, for preparing and for running each; None leaves it to the caller's own deadline."""


class AnyEpisode(ABC):
    """One rollout in the making, used once: `prepare`, then `run`; whoever takes the turns.

    Whatever an episode waits for, `cancel` ends that wait and nothing else: see `interruptible`.
    """

    def __init__(self, plan: EpisodePlan) -> None:
        self.plan = plan
        self.id = plan.id
        self.index = plan.index
        self.prompt = plan.prompt
        self.cancelled: str | None = None
        """Why it was told to end, once it was."""
        self.discarded = 0
        """Sampled tokens of `plan.saved` that are of no use: the episode goes on without them."""
        self._calling: asyncio.Task[Any] | None = None
        """What `interruptible` waits for."""

    @property
    @abstractmethod
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, in one trace or several; none before the first token."""

    @property
    @abstractmethod
    def answer(self) -> str:
        """All that follows the opening, as text for people to read."""

    @property
    @abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The policy's turns so far, for scorers."""

    @abstractmethod
    def since(self, start: int) -> Trace | None:
        """Its tokens after the first `start`, if there are any; always None where it cannot be continued from them."""

    @abstractmethod
    async def prepare(self) -> None:
        """What may take any time and submits nothing. Idempotent."""

    @abstractmethod
    async def run(self) -> Rollout:
        """Take turns until the episode ends, however it ends."""

    @abstractmethod
    async def discard(self) -> None:
        """Close an episode that will not be run (any more). Idempotent."""

    async def cancel(self, reason: str) -> None:
        """End it now: `run`, or the scoring after it, ends with what there is."""
        if self.cancelled is not None:
            return
        self.cancelled = reason
        if self._calling is not None:
            self._calling.cancel()
        await self.abort_requests()

    async def abort_requests(self) -> None:  # noqa: B027
        """Tell the engine that nobody waits for its tokens any more, where one works on them."""

    async def interruptible(self, call: Coroutine[Any, Any, T]) -> T:
        """Await this call, in a task of its own that `cancel` ends. Raises `Cancelled` where it did."""
        try:
            self.check_cancelled()
        except Cancelled:
            call.close()
            raise
        self._calling = asyncio.create_task(call)
        try:
            answer: T = await self._calling
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is None or not current.cancelling():
                self.check_cancelled()
            raise
        finally:
            self._calling = None
        self.check_cancelled()
        return answer

    def check_cancelled(self) -> None:
        """Raise `Cancelled` if the episode was told to end."""
        if self.cancelled is not None:
            raise Cancelled


def derive_seed(run_seed: int, group: int | str, index: int) -> int:
    """The seed of one rollout: 63 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
