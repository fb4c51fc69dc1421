"""The protocols of a task, which has prompts with stable ids, and of an environment, which answers turn by turn.

A task deals in messages and text only. The package `rollouts` turns them into tokens: it renders each new message once
and never tokenises an earlier turn again.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace.types import Prompt


class EnvironmentStep(msgspec.Struct, kw_only=True):
    """An environment's answer to the policy's turn."""

    messages: list[dict[str, str]] = []
    """The messages that follow, such as a tool's answer or a user's reply. Their tokens are never trained on."""
    done: bool = False
    reward: float | None = None
    """The episode's reward. If an environment gives none, the run's scorers do (see `scoring`)."""
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """One episode, used once: `reset`, then `step` after every turn of the policy, then `close`.

    An environment may have an attribute `max_tokens`: the most tokens that may be sampled in its episode, over all
    turns, if that is less than `[rollouts] max_tokens`.
    """

    async def reset(self) -> list[dict[str, str]]:
        """Return the opening messages."""
        ...

    async def step(self, completion: str) -> EnvironmentStep:
        """Answer the policy's turn. `completion` is the turn as text, rendered from its tokens without end tokens."""
        ...

    async def close(self) -> None:
        """Free everything that the episode holds, if anything. Called exactly once, also after an error."""
        return


class Task(Protocol):
    """The training prompts, the held-out prompts, and how an episode with a prompt runs."""

    train: Sequence[Prompt]
    heldout: Sequence[Prompt]
    """The held-out prompts. They share no id and no content with `train`."""

    def episode(self, prompt: Prompt) -> Environment:
        """Make a fresh environment for one rollout of this prompt."""
        ...

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return a right answer to this prompt, for a supervised warm start; None if the task has none."""
        return None

    async def close(self) -> None:
        """Release everything that the task holds for all its episodes, if anything. Idempotent."""
        return


def written_answer(prompt: Prompt, field: str | None) -> str | None:
    """Return the right answer in this field of the prompt's data; None if it is neither text nor a number."""
    value = None if field is None else prompt.data.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value)
