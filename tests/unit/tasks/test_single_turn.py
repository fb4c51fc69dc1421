from __future__ import annotations

import pytest

from headrace.tasks.base import Environment, Task
from headrace.tasks.dataset import SingleTurnTask
from headrace.types import Prompt

PROMPT = Prompt(id="a", messages=[{"role": "user", "content": "2+2?"}], data={"answer": 4})


async def test_one_turn_ends_the_episode_and_has_no_reward() -> None:
    task: Task = SingleTurnTask([PROMPT], [], demonstration_field="answer")
    environment: Environment = task.episode(PROMPT)
    assert await environment.reset() == PROMPT.messages
    step = await environment.step("4")
    assert (step.done, step.reward, step.metrics, step.messages) == (True, None, {}, [])
    await environment.close()
    await task.close()


async def test_plain_text_opens_without_messages() -> None:
    prompt = Prompt(id="t", text="2+2=")
    task = SingleTurnTask([prompt], [])
    assert await task.episode(prompt).reset() == []


@pytest.mark.parametrize(
    ("value", "shown"), [("4", "4"), (4, "4"), (0.5, "0.5"), (None, None), ([4], None), (True, None)]
)
def test_demonstrations(value: object, shown: str | None) -> None:
    prompt = Prompt(id="a", text="x", data={"answer": value})
    assert SingleTurnTask([prompt], [], "answer").demonstration(prompt) == shown
    assert SingleTurnTask([prompt], []).demonstration(prompt) is None
