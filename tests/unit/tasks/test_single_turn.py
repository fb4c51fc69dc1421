from __future__ import annotations

import pytest

from headrace.scoring.threads import CallableJudge
from headrace.tasks.base import Environment, JudgeError, Task
from headrace.tasks.single_turn import SingleTurnTask
from headrace.types import Prompt

PROMPT = Prompt(id="a", messages=[{"role": "user", "content": "2+2?"}], data={"answer": 4})


def reward(completion: str, answer: int) -> dict[str, float]:
    return {"reward": float(int(completion) == answer), "length": len(completion)}


async def test_one_turn_is_judged() -> None:
    task: Task = SingleTurnTask([PROMPT], [], CallableJudge(reward), demonstration_field="answer")
    environment: Environment = task.episode(PROMPT)
    assert await environment.reset() == PROMPT.messages
    step = await environment.step("4")
    assert (step.done, step.reward, step.metrics, step.messages) == (True, 1.0, {"length": 1.0}, [])
    assert (await task.episode(PROMPT).step("05")).reward == 0.0
    with pytest.raises(JudgeError, match="ValueError"):
        await task.episode(PROMPT).step("four")
    await environment.close()
    await task.close()
    with pytest.raises(JudgeError, match="closed"):
        await task.episode(PROMPT).step("4")


async def test_plain_text_opens_without_messages() -> None:
    prompt = Prompt(id="t", text="2+2=")
    task = SingleTurnTask([prompt], [], CallableJudge(reward))
    assert await task.episode(prompt).reset() == []


@pytest.mark.parametrize(
    ("value", "shown"), [("4", "4"), (4, "4"), (0.5, "0.5"), (None, None), ([4], None), (True, None)]
)
def test_demonstrations(value: object, shown: str | None) -> None:
    prompt = Prompt(id="a", text="x", data={"answer": value})
    assert SingleTurnTask([prompt], [], CallableJudge(reward), "answer").demonstration(prompt) == shown
    assert SingleTurnTask([prompt], [], CallableJudge(reward)).demonstration(prompt) is None
