"""The protocols of an episode and of a chat format, the plan of an episode, and the seed of a rollout.

A chat format turns only *new* messages into tokens to append. It never renders a conversation again, so the tokens of
an earlier turn stay those that were sampled.
"""

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from headrace.engines.base import Sampling
from headrace.scoring.base import Turn
from headrace.types import NO_VERSION, Int32Array, Prompt, Rollout, Trace

T = TypeVar("T")


class ChatFormat(Protocol):
    """The chat format of one model, which converts messages to tokens and back."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the model ends its turn."""
        ...

    @property
    def end_token_id(self) -> int | None:
        """The one token with which an assistant's turn ends in the chat template; None if no end is known."""
        ...

    def open(self, messages: Sequence[dict[str, str]]) -> Int32Array:
        """Return the tokens of the opening messages, up to where the policy's first turn begins."""
        ...

    def continue_(self, messages: Sequence[dict[str, str]], *, ended: bool) -> Int32Array:
        """Return the tokens of these messages, to append after the policy's turn, up to where its next turn begins.

        `ended` says whether the policy closed its turn itself. If it did not, the returned tokens begin with the end of
        the turn.
        """
        ...

    def open_text(self, text: str) -> Int32Array:
        """Return the tokens of a prompt that is plain text, after the token with which the model's texts begin."""
        ...

    def encode(self, text: str) -> Int32Array:
        """Return the tokens of a text, as it is."""
        ...

    def token_id(self, token: str) -> int:
        """Return the id of a token that is in the vocabulary as a whole."""
        ...

    def decode(self, token_ids: Int32Array) -> str:
        """Return the text of these tokens, for scorers and people."""
        ...


class Cancelled(Exception):
    """An episode was told to end."""


@dataclass(frozen=True, kw_only=True)
class EpisodePlan:
    """The plan of one episode."""

    id: str
    index: int
    """The place of the episode in its group."""
    prompt: Prompt
    sampling: Sampling
    """The sampling settings. `max_tokens` is the budget over all turns."""
    group: str = ""
    priority: int = 0
    version: int = NO_VERSION
    """The only version that may sample the turns; `NO_VERSION` if any version may. See `Request.version`."""
    max_turns: int = 1
    max_length: int | None = None
    """The length of the longest sequence that engines take, prompt included; None without a limit."""
    keep_routing: bool = False
    prefix: Trace | None = None
    """The tokens of an earlier attempt, including its opening, that the first turn continues from unchanged."""
    saved: Sequence[Trace] = ()
    """The traces of this episode in a previous process, including a prefix. If there is one trace, its turns are taken
    unchanged and given to the environment again, as long as the environment answers as before. From the first different
    answer on, the episode samples new turns. With several traces, or with an agent, the episode begins again. Sampled
    tokens that are not used are counted as `discarded`."""


TOO_LONG = "the prompt leaves no room for an answer under the longest sequence"
"""The beginning of the reason why an episode fails whose prompt is too long."""


class AnyEpisode(ABC):
    """One rollout while it is made. It is used once: `prepare`, then `run`. Subclasses differ in who drives the turns.

    `cancel` ends only the call that the episode waits for at that moment; see `interruptible`.
    """

    def __init__(self, plan: EpisodePlan) -> None:
        self.plan = plan
        self.id = plan.id
        self.index = plan.index
        self.prompt = plan.prompt
        self.cancelled: str | None = None
        """Why the episode was told to end; None if it was not."""
        self.discarded = 0
        """The number of sampled tokens of `plan.saved` that could not be used."""
        self._calling: asyncio.Task[Any] | None = None
        """The task that `interruptible` waits for."""

    @property
    @abstractmethod
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, in one trace or several; empty before the first token."""

    @property
    @abstractmethod
    def answer(self) -> str:
        """Everything after the opening, as text for people to read."""

    @property
    @abstractmethod
    def turns(self) -> Sequence[Turn]:
        """The policy's turns so far, for scorers."""

    @abstractmethod
    def since(self, start: int) -> Trace | None:
        """Return the tokens after the first `start` tokens, or None if there are none.

        The result is also None while no token is sampled, because the opening is cheap to make again. It is always None
        if a later process could not continue the episode from its tokens.
        """

    @abstractmethod
    async def prepare(self) -> None:
        """Do the work before the first request to an engine, which may take any time. Idempotent."""

    @abstractmethod
    async def run(self) -> Rollout:
        """Take turns until the episode ends, and return its rollout, whether it finished, failed or was cancelled."""

    @abstractmethod
    async def discard(self) -> None:
        """Close an episode that will not be run, or whose run was given up. Idempotent."""

    async def cancel(self, reason: str) -> None:
        """End the episode now: `run`, or the scoring after it, ends with the tokens so far."""
        if self.cancelled is not None:
            return
        self.cancelled = reason
        if self._calling is not None:
            self._calling.cancel()
        await self.abort_requests()

    async def abort_requests(self) -> None:  # noqa: B027
        """Abort the requests of this episode that an engine still works on. By default there are none."""

    async def interruptible(self, call: Coroutine[Any, Any, T]) -> T:
        """Await a call in its own task, which `cancel` can end. Raises `Cancelled` if the episode was told to end."""
        if self.cancelled is not None:
            call.close()
            raise Cancelled
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
    """Return the seed of one rollout: 63 bits, the same on every machine and in every process."""
    digest = hashlib.blake2b(f"{run_seed}/{group}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
