"""What a task is: prompts with stable ids, and an environment that answers turn by turn.

A task knows messages and text; the tokens of a conversation belong to `rollouts`, which renders each new message once
and never tokenises an earlier turn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headrace.types import Prompt


class EnvironmentStep(msgspec.Struct, kw_only=True):
    """What an environment answers to the policy's turn."""

    messages: list[dict[str, str]] = []
    """Messages that follow (a tool's answer, a user's reply); tokens of these are never trained on."""
    done: bool = False
    reward: float | None = None
    """The episode's reward. An environment without one leaves it to the run's scorers (see `scoring`)."""
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """One episode, used once: `reset`, then `step` after every turn of the policy, then `close`."""

    async def reset(self) -> list[dict[str, str]]:
        """The opening messages."""
        ...

    async def step(self, completion: str) -> EnvironmentStep:
        """Answer the policy's turn, given as text (rendered from its tokens, without end tokens)."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. Called exactly once, also after an error."""
        ...


@runtime_checkable
class Budgeted(Protocol):
    """An environment whose episode may be shorter than `[rollouts] max_tokens` allows."""

    max_tokens: int
    """Sampled tokens of the episode, over all its turns."""


class Task(Protocol):
    """Prompts, held-out prompts, and how an episode with one of them goes."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    """Disjoint from `train`, by id and by content."""

    def episode(self, prompt: Prompt) -> Environment:
        """A fresh environment for one rollout of this prompt."""
        ...

    def demonstration(self, prompt: Prompt) -> str | None:
        """A right answer to this prompt, for a supervised warm start; None if the task has none."""
        ...

    async def close(self) -> None:
        """End what the task holds for all its episodes. Idempotent."""
        ...
