"""The protocol of a scorer: it sees the tokens of rollouts as they arrive, and gives scores when a rollout has ended.

The smallest scorer implements one method:

    class Brevity(Scorer):
        async def score(self, ended: Ended) -> list[Score]:
            return [Score(value=-float(ended.rollout.sampled_tokens))]

A scorer that works while tokens arrive also overrides `span`, and `forget` for rollouts that end unscored. A scorer
serves all rollouts of a run at the same time, in the controller's event loop, so it must never block that loop.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from headrace.types import Int32Array, Prompt, Rollout, Score, Trace


class ScoreError(Exception):
    """A rollout cannot be scored, and fails. The text is the reason, in one line."""


def number(value: Any, said: str) -> float:
    """Return this value as a plain number. Raises `ScoreError`, which begins with `said`, if it is not a finite one."""
    if not hasattr(value, "__float__"):
        raise ScoreError(f"{said} a {type(value).__name__}, not a number")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ScoreError(f"{said} a {type(value).__name__}, not a number") from error
    if not math.isfinite(found):
        raise ScoreError(f"{said} {found}, not a finite number")
    return found


class Judgement(msgspec.Struct, kw_only=True):
    """A reward function's judgement of one answer."""

    reward: float
    metrics: dict[str, float] = {}
    version: str = ""
    """The version of the reward function; empty if it is not known."""


@dataclass(eq=False)
class Span:
    """Tokens by which a rollout has just grown: sampled tokens, or context such as a prompt or a tool's answer.

    Every token of a rollout is in exactly one span. `tokens` also has the records of the tokens: if `tokens.versions`
    is `NO_VERSION`, nobody sampled the token. The tokens of an agent are sent when their turn has ended, and a token
    that is in several of its traces is sent once.
    """

    rollout: str
    """The id of the rollout."""
    trace: int | None
    """The index of the trace that the tokens belong to. None in an agent's session, whose traces are known only at its
    end."""
    turn: int
    """The number of the policy's turn, counted from 0. Context belongs to the turn that follows it."""
    start: int
    """The position of the first of these tokens in the trace."""
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
    """The position of the first token of the turn in the trace."""
    end: int
    """The position after the last token of the turn. The last token is an end token if the policy ended the turn
    itself."""
    decode: Callable[[], str]

    @cached_property
    def text(self) -> str:
        """The words of the policy, without the end token."""
        return self.decode()


@dataclass(eq=False)
class Ended:
    """A rollout that has ended by itself or at its length limit, with everything that a scorer may need."""

    prompt: Prompt
    rollout: Rollout
    turns: Sequence[Turn]
    """The turns in the order in which they were taken."""

    @property
    def completion(self) -> str:
        """The text of the last turn, which is the policy's answer."""
        return self.turns[-1].text if self.turns else ""


class Scorer(ABC):
    """The base class of all scorers. The configuration gives a scorer its name."""

    version: str = ""
    """The version that is recorded with every score. Change it when the scorer would judge differently than before."""
    keeps_deadlines: bool = False
    """Whether `score` keeps its own time limit. Otherwise `[scoring] timeout` counts from the call of `score`."""

    async def start(self) -> None:  # noqa: B027
        """Prepare the scorer, before the first rollout. Raises `ConfigError` if the scorer cannot be used."""

    def span(self, span: Span) -> None:  # noqa: B027
        """Take note of tokens that have just arrived. Must return at once. The spans of one rollout come in order."""

    @abstractmethod
    async def score(self, ended: Ended) -> Sequence[Score]:
        """Return the scores of a rollout that has ended, at any levels.

        The stage fills in the scorer's name and version.

        Any exception fails the rollout. This is the last call about the rollout, even if the call is cancelled.
        """

    def forget(self, rollout_id: str) -> None:  # noqa: B027
        """Forget a rollout whose spans were seen, because `score` will not be called for it. Must return at once."""

    async def close(self) -> None:  # noqa: B027
        """Release everything that the scorer holds. Idempotent."""


class Scoring(Protocol):
    """The scoring stage as rollouts see it (see `stage.Stage`)."""

    @property
    def listening(self) -> bool:
        """Whether any scorer wants spans."""
        ...

    def span(self, span: Span) -> None:
        """Tell the scorers about tokens that have arrived."""
        ...

    async def score(self, ended: Ended) -> Rollout:
        """Return the rollout with its scores and reward, or as failed if it cannot be scored."""
        ...

    def forget(self, rollout_id: str) -> None:
        """Tell the scorers that a rollout will not be scored. Idempotent; no effect after `score`."""
        ...
