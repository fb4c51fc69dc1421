"""What a scorer is: it sees the tokens of rollouts as they arrive, and answers with scores when a rollout has ended.

The smallest scorer implements one method:

    class Brevity(Scorer):
        async def score(self, ended: Ended) -> list[Score]:
            return [Score(value=-float(ended.rollout.sampled_tokens))]

One that works while tokens arrive overrides `span` as well, and `forget` for rollouts that end unscored. A scorer
serves all rollouts of a run at the same time, in the controller's event loop: it never blocks that loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec

from headrace.types import Int32Array, Prompt, Rollout, Score, Trace


class ScoreError(Exception):
    """A rollout cannot be scored; the text is the reason, in one line. It fails that rollout and nothing else."""


class Judgement(msgspec.Struct, kw_only=True):
    """What a reward function says about one answer."""

    reward: float
    metrics: dict[str, float] = {}
    version: str = ""
    """The version of the reward function, if it is known."""


@dataclass(eq=False)
class Span:
    """Tokens that a rollout has just grown by: sampled ones, or context such as a prompt or a tool's answer.

    Every token of a rollout is in exactly one span. `tokens` has the records of the tokens too; where
    `tokens.versions` is `NO_VERSION`, nobody sampled the token. An agent's tokens are told when their turn has ended,
    and tokens that are in several of its traces are told once.
    """

    rollout: str
    """The rollout's id."""
    trace: int | None
    """The trace that the tokens belong to. None in an agent's session: its traces are known when it has ended."""
    turn: int
    """Counts the policy's turns from 0. Context belongs to the turn that follows it."""
    start: int
    """The position of the first of these tokens in their trace."""
    tokens: Trace
    decode: Callable[[Int32Array], str]

    @property
    def token_ids(self) -> Int32Array:
        """The token ids."""
        return self.tokens.token_ids

    @cached_property
    def text(self) -> str:
        """The tokens as text. A character may be cut in two where one span ends and the next begins."""
        return self.decode(self.tokens.token_ids)


@dataclass(eq=False)
class Turn:
    """One turn of the policy in a rollout that has ended."""

    trace: int
    start: int
    """The position of its first token in the trace."""
    end: int
    """The position after its last token, which is an end token where the policy ended its turn itself."""
    decode: Callable[[], str]

    @cached_property
    def text(self) -> str:
        """What the policy said, without the end token."""
        return self.decode()


@dataclass(eq=False)
class Ended:
    """A rollout that has ended by itself or at its length limit, with all that a scorer may want to know of it."""

    prompt: Prompt
    rollout: Rollout
    turns: Sequence[Turn]
    """In the order in which they were taken."""

    @property
    def completion(self) -> str:
        """The text of the last turn: the policy's answer."""
        return self.turns[-1].text if self.turns else ""


class Scorer(ABC):
    """Gives scores to rollouts. Its name is the one that the configuration gives it."""

    version: str = ""
    """Recorded with every score: change it when the scorer would judge otherwise than before."""
    keeps_deadlines: bool = False
    """Whether `score` ends in time by itself. Otherwise `[scoring] timeout` counts from its call."""

    async def start(self) -> None:  # noqa: B027
        """Get ready, before the first rollout. Raises `ConfigError` if the scorer cannot be used."""

    def span(self, span: Span) -> None:  # noqa: B027
        """Take note of tokens that have just arrived. Returns at once. The spans of one rollout come in order."""

    @abstractmethod
    async def score(self, ended: Ended) -> Sequence[Score]:
        """The scores of a rollout that has ended, at any levels; the scorer's name and version are filled in.

        Whatever this raises fails the rollout. This is the last call about the rollout, also where it is cancelled.
        """

    def forget(self, rollout_id: str) -> None:  # noqa: B027
        """Forget a rollout whose spans were told, because `score` will not be called for it. Returns at once."""

    async def close(self) -> None:  # noqa: B027
        """End what the scorer holds. Idempotent."""


class Scoring(Protocol):
    """What rollouts see of the stage that scores them (see `stage.Stage`)."""

    @property
    def listening(self) -> bool:
        """Whether anybody wants spans."""
        ...

    def span(self, span: Span) -> None:
        """Tokens have arrived."""
        ...

    async def score(self, ended: Ended) -> Rollout:
        """The rollout with its scores and reward; a rollout that cannot be scored has failed, with the reason."""
        ...

    def forget(self, rollout_id: str) -> None:
        """A rollout will not be scored. Idempotent; means nothing after `score` has returned."""
        ...
