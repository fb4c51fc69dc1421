"""Questions to something slow, dead or wrong: limited in number and time, asked again, and ended with a reason."""

import asyncio

import pytest

from headrace.config.scorers import JudgeConfig
from headrace.scoring.asking import Asking, NoUseToRetry, Unreachable
from headrace.scoring.base import ScoreError


def asking(**limits: float) -> Asking:
    return Asking(JudgeConfig(template="{completion}", **limits))


class Answers:
    """Gives these answers in turn. An exception is raised, and a number is how long the last answer takes."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.attempts: list[int] = []

    async def __call__(self, attempt: int) -> str:
        self.attempts.append(attempt)
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
        return str(answer)


async def test_a_question_is_asked_again_and_then_fails_with_the_last_reason() -> None:
    answers = Answers(ScoreError("first"), "good")
    assert await asking(retries=1).ask(answers) == "good"
    assert answers.attempts == [0, 1]
    with pytest.raises(ScoreError, match=r"^second$"):
        await asking(retries=1).ask(Answers(ScoreError("first"), ScoreError("second"), "never"))


async def test_a_question_that_is_too_slow_is_asked_again() -> None:
    assert await asking(retries=1, timeout=0.05).ask(Answers(5.0, "good")) == "good"
    with pytest.raises(ScoreError, match=r"^there was no answer within 0\.05 s$"):
        await asking(retries=0, timeout=0.05).ask(Answers(5.0, "never"))


async def test_what_would_fail_again_is_asked_once() -> None:
    answers = Answers(NoUseToRetry("refused"), "never")
    with pytest.raises(ScoreError, match=r"^refused$"):
        await asking(retries=5).ask(answers)
    assert answers.attempts == [0]


async def test_an_outage_is_waited_for_and_does_not_use_up_the_retries() -> None:
    answers = Answers(Unreachable("gone"), Unreachable("gone"), "good")
    assert await asking(retries=0, patience=30.0).ask(answers) == "good"
    assert answers.attempts == [0, 0, 0]
    with pytest.raises(ScoreError, match=r"^gone$"):
        await asking(retries=0, patience=0.0).ask(Answers(Unreachable("gone"), "never"))


async def test_no_more_questions_are_under_way_than_allowed() -> None:
    most = running = 0

    async def attempt(number: int) -> None:
        nonlocal most, running
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    limited = asking(concurrency=3)
    await asyncio.gather(*(limited.ask(attempt) for _ in range(10)))
    assert most == 3


async def test_a_place_is_free_again_after_a_failure_and_after_a_cancellation() -> None:
    limited = asking(concurrency=1, retries=0)
    with pytest.raises(ScoreError):
        await limited.ask(Answers(ScoreError("wrong")))
    waiting = asyncio.create_task(limited.ask(Answers(60.0)))
    await asyncio.sleep(0.01)
    waiting.cancel()
    async with asyncio.timeout(5):
        assert await limited.ask(Answers("good")) == "good"
