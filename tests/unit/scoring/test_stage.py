"""The scoring stage: what scorers are told, how their scores become a reward, and how a rollout fails."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, DeadlineError
from headrace.scoring.base import Ended, ScoreError, Scorer, Span, Stage, Turn
from headrace.scoring.rewards import ThreadScorer
from headrace.types import Prompt, Rollout, Score, Trace

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Q"}], data={"answer": "yes"})


class Says(Scorer):
    """Answers as it is told to."""

    def __init__(self, answer: Callable[[Ended], Any], *, version: str = "7") -> None:
        self.version = version
        self._answer = answer

    async def score(self, ended: Ended) -> Sequence[Score]:
        answer = self._answer(ended)
        return [Score(value=answer)] if isinstance(answer, int | float) else answer  # type: ignore[no-any-return]


class Hears(Scorer):
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.forgotten: list[str] = []

    def span(self, span: Span) -> None:
        if span.token_ids[0] == 13:
            raise ValueError("unlucky")
        self.spans.append(span)

    async def score(self, ended: Ended) -> Sequence[Score]:
        return [Score(value=1.0)]

    def forget(self, rollout_id: str) -> None:
        self.forgotten.append(rollout_id)


def ended(*scores: Score, **metrics: float) -> Ended:
    trace = Trace.of_context(np.arange(6, dtype=np.int32))
    rollout = Rollout(
        id="9/0", index=0, traces=[trace], ending="finished", scores=list(scores), metrics={"turns": 1.0, **metrics}
    )
    return Ended(PROMPT, rollout, [Turn(0, 2, 4, lambda: "no"), Turn(0, 5, 6, lambda: "yes")])


def bits(value: float | None) -> bytes:
    assert value is not None
    return struct.pack("<d", value)


@pytest.mark.parametrize("value", [0.1, -0.0, 1 / 3, 1e-310, -math.pi])
async def test_one_score_is_the_reward_bit_for_bit(value: float) -> None:
    rollout = await Stage({"only": Says(lambda _: value)}).score(ended())
    assert bits(rollout.reward) == bits(value)
    assert rollout.scores == [Score(value=value, scorer="only", version="7")]
    given = ended(Score(value=value, scorer="environment"))
    assert bits((await Stage().score(given)).reward) == bits(value)


async def test_scores_of_the_whole_rollout_are_weighted_and_finer_ones_are_recorded() -> None:
    finer = [
        Score(value=9.0, level="turn", start=2, end=4),
        Score(value=8.0, level="token", start=5, end=6, version="own"),
        Score(value=np.float32(0.5), metrics={"words": 3}),  # type: ignore[arg-type]
    ]
    stage = Stage({"a": Says(lambda _: finer), "b": Says(lambda _: 2)}, {"a": 4.0})
    rollout = await stage.score(ended(Score(value=10.0, scorer="environment")))
    assert rollout.reward == 10.0 + 4.0 * 0.5 + 2.0
    assert [(s.scorer, s.version, s.level, s.value) for s in rollout.scores] == [
        ("environment", "", "rollout", 10.0), ("a", "7", "turn", 9.0), ("a", "own", "token", 8.0),
        ("a", "7", "rollout", 0.5), ("b", "7", "rollout", 2.0),
    ]  # fmt: skip
    assert type(rollout.scores[3].value) is float
    assert rollout.metrics == {"turns": 1.0, "words": 3.0}


async def test_a_metric_of_the_same_name_is_recorded_under_its_scorers_name() -> None:
    scorers = {name: Says(lambda _, n=n: [Score(value=0, metrics={"n": n})]) for n, name in enumerate("ab")}
    assert (await Stage(scorers).score(ended())).metrics == {"turns": 1.0, "n": 0.0, "b/n": 1.0}


async def test_a_reward_function_is_asked_about_the_last_turn() -> None:
    def reward(completion: str, answer: str) -> dict[str, float]:
        return {"reward": float(completion == answer), "length": len(completion)}

    rollout = await Stage({"reward": ThreadScorer(reward)}).score(ended())
    assert (rollout.reward, rollout.metrics["length"]) == (1.0, 3.0)


def raising(error: BaseException) -> Says:
    def answer(_: Ended) -> Any:
        raise error

    return Says(answer)


class Hangs(Says):
    def __init__(self) -> None:
        super().__init__(lambda _: 1.0)

    async def score(self, ended: Ended) -> Sequence[Score]:
        await asyncio.sleep(60)
        return []


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        (raising(ScoreError("the reward function took more than 1 s")), "the reward function took more than 1 s"),
        (raising(KeyError("q")), "the scorer 'odd' raised KeyError: 'q' (test_stage.py, line "),
        (raising(TimeoutError("theirs")), "the scorer 'odd' raised TimeoutError: theirs"),
        (raising(asyncio.CancelledError()), "the scorer 'odd' cancelled itself"),
        (Hangs(), "the scorer 'odd' took more than 0.1 s"),
        (Says(lambda _: "good"), "the scorer 'odd' gave a str, not a list of scores"),
        (Says(lambda _: None), "the scorer 'odd' gave a NoneType, not a list of scores"),
        (Says(lambda _: [1.0]), "the scorer 'odd' gave a list, not a list of scores"),
        (Says(lambda _: []), "no score of the whole rollout came from 'odd'"),
        (Says(lambda _: math.nan), "the scorer 'odd' gave, as value, nan, not a finite number"),
        (Says(lambda _: [Score(value="x")]), "the scorer 'odd' gave, as value, a str, not a number"),  # type: ignore[arg-type]
        (Says(lambda _: [Score(value=1, metrics={"m": math.inf})]), "the scorer 'odd' gave, as m, inf, not a finite"),
        (Says(lambda _: [Score(value=1, metrics=None)]), "the scorer 'odd' raised AttributeError"),  # type: ignore[arg-type]
        (Says(lambda _: [Score(value=1, level="word")]), "the scorer 'odd' gave a score of level 'word', not rollout"),  # type: ignore[arg-type]
        (
            Says(lambda _: [Score(value=1, level="turn", start=2, end=7)]),
            "the scorer 'odd' gave a score for tokens 2 to 7 of trace 0, which has 6 tokens",
        ),
        (Says(lambda _: [Score(value=1, level="token", trace=1, start=0, end=1)]), "the scorer 'odd' gave a score for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("beside", [False, True])
async def test_whatever_a_scorer_does_fails_its_rollout_only(scorer: Scorer, reason: str, beside: bool) -> None:
    others = {"other": Says(lambda _: [])} if beside else {}
    rollout = await Stage({"odd": scorer, **others}, timeout=0.1).score(ended())
    assert (rollout.ending, rollout.reward) == ("failed", None)
    assert rollout.reason.startswith(reason.removesuffix("'odd'")) and "\n" not in rollout.reason


async def test_a_rollout_that_nobody_scores_fails() -> None:
    rollout = await Stage().score(ended())
    assert (rollout.ending, rollout.reason) == ("failed", "the environment ended the episode without a reward")


def span(first: int, rollout: str = "9/0") -> Span:
    return Span(rollout, 0, 0, 0, Trace.of_context(np.array([first], np.int32)), lambda ids: f"<{ids[0]}>")


async def test_spans_reach_the_scorers_that_want_them_and_are_forgotten_once() -> None:
    hears = Hears()
    stage = Stage({"plain": Says(lambda _: 1.0), "hears": hears})
    assert stage.listening and not Stage({"plain": Says(lambda _: 1.0)}).listening
    stage.span(span(1))
    stage.span(span(2, "9/1"))
    assert [(one.rollout, one.text) for one in hears.spans] == [("9/0", "<1>"), ("9/1", "<2>")]
    assert (await stage.score(ended())).reward == 2.0
    stage.forget("9/0")
    assert hears.forgotten == [], "it was scored"
    stage.forget("9/1")
    stage.forget("9/1")
    stage.forget("9/2")
    assert hears.forgotten == ["9/1"]


async def test_a_scorer_that_cannot_take_a_span_fails_that_rollout_when_it_ends() -> None:
    hears = Hears()
    stage = Stage({"hears": hears})
    stage.span(span(13))
    stage.span(span(1))
    stage.span(span(1, "9/1"))
    rollout = await stage.score(ended())
    assert rollout.ending == "failed"
    assert rollout.reason.startswith("the scorer 'hears' raised ValueError: unlucky (test_stage.py, line ")
    assert hears.forgotten == ["9/0"]


async def test_all_scorers_are_started_and_closed() -> None:
    class Held(Hears):
        state = ""

        async def start(self) -> None:
            if self.version == "bad":
                raise ValueError("no")
            self.state += "started "

        async def close(self) -> None:
            self.state += "closed "

    good, bad = Held(), Held()
    stage = Stage({"good": good, "bad": bad})
    await stage.start()
    await stage.close()
    assert (good.state, bad.state) == ("started closed ", "started closed ")
    good.state, bad.version = "", "bad"
    with pytest.raises(ConfigError, match=r"^the scorer 'bad' raised ValueError: no"):
        await stage.start()
    assert good.state == "started closed ", "an error leaves none of them open"


def test_a_scorer_of_one_task_judges_only_its_answers() -> None:
    scorers = {"math/reward": Says(lambda _: 1.0), "code/reward": Says(lambda _: 10.0), "judge": Says(lambda _: 100.0)}
    stage = Stage(scorers, {"math/reward": 2.0}, tasks={"math/reward": "math", "code/reward": "code"})
    given = ended()

    def of(task: str, *scores: Score) -> Rollout:
        prompt = Prompt(id=f"{task}/p", text="?", task=task)
        return asyncio.run(stage.score(Ended(prompt, ended(*scores).rollout, given.turns)))

    assert [of(task).reward for task in ("math", "code", "tool")] == [102.0, 110.0, 100.0]
    assert [score.scorer for score in of("math").scores] == ["math/reward", "judge"]
    alone = Stage({"math/reward": Says(lambda _: 1.0)}, tasks={"math/reward": "math"})
    stage = alone
    assert of("tool", Score(value=0.5, scorer="environment")).reward == 0.5
    assert of("tool").reason == "the environment ended the episode without a reward"


async def test_a_scorer_that_fails_when_it_is_asked_to_end_a_rollout_fails_that_rollout() -> None:
    class Wrong(Scorer):
        def span(self, span: Span) -> None:
            pass

        def doomed(self, rollout_id: str) -> bool:
            raise KeyError(rollout_id)

        async def score(self, ended: Ended) -> list[Score]:
            return [Score(value=1.0)]

    stage = Stage({"wrong": Wrong()})
    assert not stage.doomed("1/0")
    rollout = Rollout(id="1/0", index=0, traces=[], ending="finished")
    failed = await stage.score(Ended(Prompt(id="p"), rollout, []))
    assert failed.ending == "failed"
    assert failed.reason.startswith("the scorer 'wrong' raised KeyError")


async def test_all_scorers_close_if_one_of_them_fails_to() -> None:
    closed = []

    class Closing(Scorer):
        def __init__(self, name: str) -> None:
            self.name = name

        async def score(self, ended: Ended) -> list[Score]:
            return []

        async def close(self) -> None:
            if self.name == "bad":
                raise ValueError("no")
            await asyncio.sleep(0.01)
            closed.append(self.name)

    with pytest.raises(ValueError, match="no"):
        await Stage({name: Closing(name) for name in ("bad", "good")}).close()
    assert closed == ["good"]


class NeverCloses(Says):
    """Never closes."""

    def __init__(self) -> None:
        super().__init__(lambda _: 1.0)
        self.given_up = False

    async def start(self) -> None:
        raise ValueError("no model")

    async def close(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up = True


async def test_a_scorer_that_does_not_close_is_named_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.scoring.base.RELEASE_SECONDS", 0.05)
    never = NeverCloses()
    async with asyncio.timeout(5):
        with pytest.raises(DeadlineError, match=r"^the scorer 'never' did not close within 0\.05 s$"):
            await Stage({"good": Says(lambda _: 1.0), "never": never}).close()
    assert never.given_up


async def test_a_scorer_that_does_not_close_hides_no_error_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.scoring.base.RELEASE_SECONDS", 0.05)
    async with asyncio.timeout(5):
        with pytest.raises(ConfigError, match="no model"):
            await Stage({"never": NeverCloses()}).start()


async def test_what_a_scorer_raises_when_it_is_closed_hides_no_error_of_its_start() -> None:
    class Unprepared(Says):
        async def start(self) -> None:
            raise ValueError("no model")

        async def close(self) -> None:
            self.client.close()  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="no model"):
        await Stage({"unprepared": Unprepared(lambda _: 1.0)}).start()


async def test_a_scorer_may_cancel_a_task_of_its_own_when_it_is_closed() -> None:
    class Cancels(Says):
        async def close(self) -> None:
            task = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            task.cancel()
            await task

    await Stage({"cancels": Cancels(lambda _: 1.0)}).close()


async def test_every_scorer_is_asked_about_a_rollout_that_is_cancelled_at_once() -> None:
    """A scorer that has seen tokens of a rollout keeps them until it is asked, even if that call is cancelled."""
    asked = []

    class Keeps(Scorer):
        def __init__(self, name: str) -> None:
            self.name = name

        async def score(self, ended: Ended) -> list[Score]:
            asked.append(self.name)
            await asyncio.sleep(60)
            return []

    stage = Stage({name: Keeps(name) for name in ("one", "two")})
    rollout = Rollout(id="1/0", index=0, traces=[], ending="finished")
    scoring = asyncio.create_task(stage.score(Ended(Prompt(id="p"), rollout, [])))
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, scoring.cancel)
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert asked == ["one", "two"]
