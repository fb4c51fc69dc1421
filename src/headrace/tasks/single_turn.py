"""The plain task: one question, one answer, one judgement."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.tasks.base import EnvironmentStep, Judge
from headrace.types import Prompt


class SingleTurnTask:
    """Prompts whose single answer a judge scores. Owns the judge: closing the task closes it."""

    def __init__(
        self,
        train: Sequence[Prompt],
        heldout: Sequence[Prompt],
        judge: Judge,
        demonstration_field: str | None = None,
    ) -> None:
        """`demonstration_field` names the field of a prompt's `data` that holds a right answer."""
        self.train = train
        self.heldout = heldout
        self._judge = judge
        self._demonstration_field = demonstration_field

    def episode(self, prompt: Prompt) -> SingleTurn:
        """A fresh environment for one rollout of this prompt."""
        return SingleTurn(prompt, self._judge)

    def demonstration(self, prompt: Prompt) -> str | None:
        """The right answer in the prompt's data, if it has one as text or as a number."""
        if self._demonstration_field is None:
            return None
        value = prompt.data.get(self._demonstration_field)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        return str(value)

    async def close(self) -> None:
        """End the reward workers. Idempotent."""
        await self._judge.close()


class SingleTurn:
    """One answer, judged; an `Environment` of one turn."""

    def __init__(self, prompt: Prompt, judge: Judge) -> None:
        self._prompt = prompt
        self._judge = judge

    async def reset(self) -> list[dict[str, str]]:
        """The prompt's messages; none for a prompt that is plain text, which is opened as it is."""
        return list(self._prompt.messages or [])

    async def step(self, completion: str) -> EnvironmentStep:
        """Judge the answer; raises `JudgeError` when there is no judgement."""
        judgement = await self._judge.judge(self._prompt, completion)
        return EnvironmentStep(done=True, reward=judgement.reward, metrics=judgement.metrics)

    async def close(self) -> None:
        """Nothing is held: the judge belongs to the task."""
