"""How long a question may take by its limits: no question of any kind takes longer, whatever happens to it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.channel import worker_pool
from headrace.channel.codec import Message
from headrace.config.scorers import ServedScorerSection
from headrace.engines.step_values import ReadSteps, StepAnswer, StepsRead
from headrace.scoring import asking, limits, model_process, process_reward, programs
from headrace.scoring.asking import Asking, Unreachable
from headrace.scoring.base import Ended, ScoreError
from headrace.scoring.limits import longest_judgement, longest_question, longest_reading, longest_wait
from headrace.scoring.model_process import ModelProcess
from headrace.scoring.process_reward import ProcessRewardScorer
from headrace.scoring.rewards import ThreadScorer, WorkerScorer
from headrace.sim.run import run_virtual
from headrace.types import Prompt, Rollout, Trace

SECTIONS = st.builds(
    ServedScorerSection,
    timeout=st.floats(0.1, 100),
    retries=st.integers(0, 4),
    patience=st.just(0.0) | st.floats(0.1, 300),
)
FATES = st.lists(st.tuples(st.sampled_from([Unreachable, ScoreError]), st.floats(0, 1)), min_size=1)
"""How attempts fail, again and again, and which share of the longest time each of them takes."""
ONE_AWAY = ServedScorerSection(timeout=10, retries=1, patience=60)


class Failing:
    """What answers no question, in these ways."""

    def __init__(self, section: ServedScorerSection, fates: list[tuple[type[ScoreError], float]]) -> None:
        self._longest = section.timeout + limits.BESIDE_SECONDS
        self._fates = fates
        self.attempts = 0

    async def attempt(self, *_: object) -> None:
        failure, share = self._fates[self.attempts % len(self._fates)]
        self.attempts += 1
        await asyncio.sleep(share * self._longest)
        raise failure("no")


async def seconds_of(question: Any) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(ScoreError):
        await question
    return loop.time() - began


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    for module in (asking, process_reward):
        monkeypatch.setattr(module, "time", clock)


@given(SECTIONS, FATES)
@example(ONE_AWAY, [(Unreachable, 1.0)])
@example(ONE_AWAY, [(ScoreError, 1.0)])
@example(ONE_AWAY, [(Unreachable, 0.1), (Unreachable, 0.1), (ScoreError, 1.0)])
def test_no_question_takes_longer_than_its_limits_allow(section: ServedScorerSection, fates: Any) -> None:
    failing = Failing(section, fates)
    took = run_virtual(seconds_of(Asking(section, timed=False).ask(failing.attempt)))
    assert took <= longest_question(section)
    assert failing.attempts > section.retries


class FailingProcess(ModelProcess):
    """The process of a reward model that fails in these ways."""

    def __init__(self, failing: Failing) -> None:
        super().__init__("scorer-0", timeout=1.0)
        self._failing = failing

    async def ask(self, message: Message, reply: Any) -> Any:
        await self._failing.attempt()

    async def tell(self, message: Message) -> None:
        pass


def ended() -> Ended:
    flags = np.ones(3, bool)
    trace = Trace(
        token_ids=np.array([5, 6, 3], np.int32),
        trained=flags,
        logprobs=np.zeros(3, np.float32),
        versions=np.zeros(3, np.int32),
    )
    return Ended(Prompt(id="p"), Rollout(id="1/0", index=0, traces=[trace], ending="finished"), [])


@given(SECTIONS, FATES)
@example(ONE_AWAY, [(Unreachable, 1.0)])
@example(ONE_AWAY, [*[(Unreachable, 0.2)] * 18, (ScoreError, 1.0)])
def test_no_answer_waits_longer_for_the_verdicts_on_its_steps(section: ServedScorerSection, fates: Any) -> None:
    failing = Failing(section, fates)
    scorer = ProcessRewardScorer(FailingProcess(failing), {3}, limits=section)

    async def score() -> float:
        took = await seconds_of(scorer.score(ended()))
        await scorer.close()
        return took

    assert run_virtual(score()) <= longest_reading(section)
    assert failing.attempts > section.retries


def test_an_answer_may_wait_for_a_message_that_is_under_way() -> None:
    """The steps of a second answer are sent only when the message about the first one has ended."""
    section = ServedScorerSection(timeout=10, retries=0, patience=0, concurrency=1)

    class Slow(FailingProcess):
        async def ask(self, message: Message, reply: Any) -> Any:
            assert isinstance(message, ReadSteps)
            await asyncio.sleep(section.timeout)
            answers = [StepAnswer(values=[0.5] * len(growth.wanted)) for growth in message.growths]
            return StepsRead(answers=answers, version="1", time=0.0)

    async def score() -> float:
        scorer = ProcessRewardScorer(Slow(Failing(section, [])), {3}, limits=section)
        first = asyncio.create_task(scorer.score(ended()))
        await asyncio.sleep(1)
        other = ended()
        other.rollout.id = "1/1"
        began = asyncio.get_running_loop().time()
        await scorer.score(other)
        took = asyncio.get_running_loop().time() - began
        await first
        await scorer.close()
        return took

    assert longest_question(section) < run_virtual(score()) <= longest_reading(section)


def test_what_an_attempt_may_take_beside_its_timeout() -> None:
    assert limits.BESIDE_SECONDS >= model_process.READY_SECONDS
    assert limits.BESIDE_SECONDS >= 2 * programs.END_SECONDS
    assert limits.BESIDE_SECONDS >= worker_pool.CLOSE_SECONDS


def test_a_place_is_free_when_all_that_wait_for_one_had_theirs() -> None:
    assert [longest_wait(waiting, 2, 10.0) for waiting in range(5)] == [20, 20, 30, 30, 40]


async def test_a_reward_function_has_its_time_twice() -> None:
    assert longest_judgement(30.0, 60.0) == 2 * (30 + 60 + limits.BESIDE_SECONDS)
    assert WorkerScorer("a:b", timeout=3.0, start_timeout=4.0).answers_within == longest_judgement(3.0, 4.0)
    assert ThreadScorer(lambda completion: 1.0, 3.0).answers_within == longest_judgement(3.0)
