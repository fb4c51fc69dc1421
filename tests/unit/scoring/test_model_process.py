"""The process of a scorer's model, as the controller sees it: away, dead, or alive without answers."""

import asyncio
from typing import Any

import pytest

from headrace.channel.codec import Message
from headrace.engines.step_values import ReadSteps, StepsRead
from headrace.errors import ChannelError, DeadlineError, PeerDied
from headrace.scoring import model_process
from headrace.scoring.asking import Unreachable
from headrace.scoring.base import ScoreError
from headrace.scoring.model_process import HANGS_AFTER, ModelProcess

QUESTION = ReadSteps(growths=[])
ANSWER = StepsRead(answers=[], version="v", time=0.0)


class FakeHub:
    """Answers the questions of a process with these results in turn. An exception is raised."""

    def __init__(self, *results: object) -> None:
        self._results = list(results)

    async def request(self, peer: str, message: Message, reply: type, *, timeout: float) -> Any:
        await asyncio.sleep(0)
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def process(*results: object) -> ModelProcess:
    made = ModelProcess("scorer-0", timeout=5.0)
    made.connect(FakeHub(*results))  # type: ignore[arg-type]
    return made


LATE = DeadlineError("scorer-0 did not answer")


async def test_a_process_that_answers_nothing_in_time_hangs() -> None:
    silent = process(*[LATE] * HANGS_AFTER)
    for _ in range(HANGS_AFTER):
        assert not silent.hangs
        with pytest.raises(ScoreError, match=r"^scorer-0 took more than 5 s$"):
            await silent.ask(QUESTION, StepsRead)
    assert silent.hangs
    silent.lost("it did not answer")
    assert not silent.hangs


@pytest.mark.parametrize("answer", [ANSWER, ChannelError("scorer-0: it cannot read this")])
async def test_a_process_that_answers_some_questions_does_not_hang(answer: object) -> None:
    slow = process(LATE, answer, LATE, answer)
    for _ in range(2 * HANGS_AFTER):
        await asyncio.gather(slow.ask(QUESTION, StepsRead), return_exceptions=True)
        assert not slow.hangs


async def test_questions_that_were_open_together_count_as_one() -> None:
    slow = process(*[LATE] * 10)
    await asyncio.gather(*(slow.ask(QUESTION, StepsRead) for _ in range(10)), return_exceptions=True)
    assert not slow.hangs


async def test_a_process_that_is_away_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_process, "READY_SECONDS", 0.02)
    dying = process(PeerDied("scorer-0", "killed by signal 9"), ANSWER)
    with pytest.raises(ScoreError, match=r"^scorer-0 died: killed by signal 9$"):
        await dying.ask(QUESTION, StepsRead)
    dying.lost("killed by signal 9")
    with pytest.raises(Unreachable, match=r"^scorer-0 is not ready \(it died: killed by signal 9\)$"):
        await dying.ask(QUESTION, StepsRead)
    dying.back()
    assert await dying.ask(QUESTION, StepsRead) is ANSWER
