"""The plain task: one question, one answer. The task gives no reward of its own; the run's scorers do."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tasks.base import EnvironmentStep
from headrace.types import Prompt


class SingleTurnTask:
    """A task whose prompts are each answered once."""

    def __init__(
        self,
        train: Sequence[Prompt],
        heldout: Sequence[Prompt],
        demonstration_field: str | None = None,
    ) -> None:
        """`demonstration_field` names the field of a prompt's `data` that holds a right answer."""
        self.train = train
        self.heldout = heldout
        self._demonstration_field = demonstration_field

    def episode(self, prompt: Prompt) -> SingleTurn:
        """Make a fresh environment for one rollout of this prompt."""
        return SingleTurn(prompt)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the right answer in the prompt's data; None if it has none as text or as a number."""
        if self._demonstration_field is None:
            return None
        value = prompt.data.get(self._demonstration_field)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        return str(value)

    async def close(self) -> None:
        """Do nothing: the task holds nothing."""


class SingleTurn:
    """An `Environment` of one turn, without a reward."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    async def reset(self) -> list[dict[str, str]]:
        """Return the prompt's messages. A prompt that is plain text has none, and is opened as it is."""
        return list(self._prompt.messages or [])

    async def step(self, completion: str) -> EnvironmentStep:
        """End the episode: the answer is its only turn."""
        return EnvironmentStep(done=True)

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""
