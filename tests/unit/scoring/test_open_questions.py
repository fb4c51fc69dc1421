"""Open questions excuse a silent run as long as the limits of a scorer that is asked allow, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.config.scorers import TeacherConfig
from headrace.scoring.asking import Asking
from headrace.scoring.base import Ended, Scorer, Stage
from headrace.scoring.limits import longest_question
from headrace.scoring.open_questions import OpenQuestions
from headrace.scoring.teachers import Teachers
from headrace.sim.run import run_virtual
from headrace.types import Float32Array, Int32Array, Prompt, Rollout, Score, TeacherScores, Trace


class Silent(Scorer):
    """Never returns."""

    async def score(self, ended: Ended) -> Sequence[Score]:
        await asyncio.Event().wait()
        return []


class KeepsDeadlines(Silent):
    keeps_deadlines = True


class Patient(KeepsDeadlines):
    answers_within = 100.0


def ended(number: int = 0) -> Ended:
    traces = [
        Trace(
            token_ids=np.arange(2, dtype=np.int32),
            trained=np.ones(2, bool),
            logprobs=np.zeros(2, np.float32),
            versions=np.zeros(2, np.int32),
        )
    ] * 3
    return Ended(Prompt(id="p"), Rollout(id=f"{number}/0", index=0, traces=traces, ending="finished"), [])


def test_a_scorer_is_excused_until_it_was_silent_for_too_long() -> None:
    now = [0.0]
    questions = OpenQuestions(lambda: now[0])
    assert not questions.within_limits
    with questions.ask("one", 10.0):
        now[0] = 8.0
        with questions.ask("one", 10.0):
            now[0] = 9.0
        # A question has ended, so that the next one may have its place only now.
        now[0] = 19.0
        assert questions.within_limits
        assert questions.silent() == {"one": (1, 10.0)}
        now[0] = 19.5
        assert not questions.within_limits
        with questions.ask("other", 1.0):
            assert questions.within_limits
            now[0] = 21.0
            assert not questions.within_limits
    assert questions.silent() == {}
    now[0] = 50.0
    with questions.ask("one", 10.0):
        assert questions.silent() == {"one": (1, 0.0)}


def test_a_question_that_fails_or_is_given_up_is_open_no_more() -> None:
    questions = OpenQuestions()
    with pytest.raises(ValueError, match="no"), questions.ask("one", 10.0):
        raise ValueError("no")
    assert questions.silent() == {} and not questions.within_limits


@pytest.mark.parametrize(("scorer", "limit"), [(Silent, 20.0), (KeepsDeadlines, 20.0), (Patient, 100.0)])
def test_what_bounds_a_scorer_of_the_users_own(scorer: type[Scorer], limit: float) -> None:
    async def excused() -> tuple[bool, bool, dict[str, tuple[int, float]]]:
        stage = Stage({"mine": scorer()}, timeout=20.0)
        stage.questions = OpenQuestions(asyncio.get_running_loop().time)
        scoring = asyncio.create_task(stage.score(ended()))
        await asyncio.sleep(limit - 1)
        before, silent = stage.questions.within_limits, stage.questions.silent()
        await asyncio.sleep(2)
        after = stage.questions.within_limits
        scoring.cancel()
        await asyncio.wait([scoring])
        return before, after, silent

    assert run_virtual(excused()) == (True, False, {"the scorer 'mine'": (1, limit - 1)})


class SlowTeacher:
    """Takes its whole time for each sequence."""

    label, process = "slow", None

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, token_ids: Int32Array, temperatures: Float32Array) -> TeacherScores:
        await asyncio.sleep(self._seconds)
        scores = TeacherScores.of_unscored(len(token_ids), 0)
        scores.logprobs[:] = -1.0
        scores.versions[:] = 0
        return scores


def test_questions_that_wait_for_places_are_within_their_limits() -> None:
    """Each question has one of two places for its whole time, and a rollout asks three times."""
    section = TeacherConfig(model="m", timeout=10.0, retries=0, patience=0.0, concurrency=2)
    assert Asking(section).longest == longest_question(section) < 20

    async def excused() -> set[bool]:
        teachers = Teachers({"big": SlowTeacher(9.0)}, {"big": section}, field="teacher")
        questions = teachers.questions = OpenQuestions(asyncio.get_running_loop().time)
        stage, found = Stage(teachers=teachers), set()
        assert stage.questions is questions
        scoring = asyncio.gather(*(stage.score(ended(number)) for number in range(8)))
        while True:
            await asyncio.sleep(0.7)
            if scoring.done():
                break
            found.add(questions.within_limits)
            assert set(questions.silent()) == {"the teacher 'big'"}
        assert {rollout.ending for rollout in await scoring} == {"finished"}
        assert asyncio.get_running_loop().time() > 5 * longest_question(section)
        return found

    assert run_virtual(excused()) == {True}
