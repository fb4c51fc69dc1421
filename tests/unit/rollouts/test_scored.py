"""Episodes and the scoring stage: tokens are told as they arrive, and a rollout is scored as soon as it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from rollout_parts import END, Script, TinyChat, done, episode, says, until

from headrace.engines.base import Sampling
from headrace.engines.fake import FakeEngine
from headrace.pipeline.episodes import evaluate
from headrace.rollouts.base import EpisodePlan
from headrace.rollouts.groups import cancel_group, prepare_group, run_episode, run_group
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Ended, Scorer, Span, Stage
from headrace.types import NO_VERSION, Group, Prompt, Score


def group() -> Group:
    return Group(id=9, prompt=Prompt(id="p", text="q"), version=1)


class Watching(Scorer):
    """Keeps what it is told; `hold` keeps it from answering."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        self.ended: dict[str, Ended] = {}
        self.order: list[str] = []
        self.forgotten: list[str] = []
        self.hold: dict[str, asyncio.Event] = {}

    def span(self, span: Span) -> None:
        self.spans.setdefault(span.rollout, []).append(span)

    async def score(self, ended: Ended) -> Sequence[Score]:
        self.ended[ended.rollout.id] = ended
        if ended.rollout.id in self.hold:
            await self.hold[ended.rollout.id].wait()
        self.order.append(ended.rollout.id)
        return [Score(value=float(len(ended.turns)))]

    def forget(self, rollout_id: str) -> None:
        self.forgotten.append(rollout_id)


async def test_every_token_is_told_once_as_it_arrives_and_turns_are_where_they_say() -> None:
    watching = Watching()
    stage, chat = Stage({"w": watching}), TinyChat()
    environment = Script(says("warm"), says("hot"), done(0.25))
    one = episode(environment, FakeEngine(version=1, lengths=[6, 4, 8]), chat=chat, scoring=stage)
    await one.prepare()
    running = asyncio.create_task(run_episode(one, stage))
    await until(lambda: len(watching.spans["9/0"]) >= 3)
    assert not running.done() and not watching.ended, "tokens are told before the rollout has ended"
    rollout = await asyncio.wait_for(running, 60)
    (trace,) = rollout.traces
    spans = watching.spans["9/0"]
    assert [span.start for span in spans] == np.cumsum([0, *(len(span.tokens) for span in spans[:-1])]).tolist()
    np.testing.assert_array_equal(np.concatenate([span.token_ids for span in spans]), trace.token_ids)
    np.testing.assert_array_equal(np.concatenate([span.tokens.versions for span in spans]), trace.versions)
    assert {span.turn for span in spans} == {0, 1, 2} and {span.trace for span in spans} == {0}
    turns = watching.ended["9/0"].turns
    assert [turn.text for turn in turns] == environment.heard
    for turn in turns:
        sampled = trace.versions[turn.start : turn.end] != NO_VERSION
        assert sampled.all() and trace.token_ids[turn.end - 1] == END
        assert turn.text == chat.decode(trace.token_ids[turn.start : turn.end - 1])
    assert sum(turn.end - turn.start for turn in turns) == rollout.trained_tokens
    assert rollout.reward == 0.25 + 3.0
    assert [(score.scorer, score.value) for score in rollout.scores] == [("environment", 0.25), ("w", 3.0)]
    assert watching.forgotten == []


async def test_an_episode_that_goes_on_from_a_previous_process_tells_all_its_tokens() -> None:
    plain = episode(Script(done()), FakeEngine(version=1, lengths=[12]))
    await plain.prepare()
    (whole,) = (await plain.run()).traces
    watching = Watching()
    stage = Stage({"w": watching})
    plan = EpisodePlan(
        id="9/0", index=0, prompt=plain.prompt, sampling=Sampling(max_tokens=200, seed=5),
        saved=[whole.part(0, len(whole) - 4)],
    )  # fmt: skip
    resumed = Episode(plan, Script(done()), FakeEngine(version=1, lengths=[4]), TinyChat(), stage)
    await resumed.prepare()
    rollout = await run_episode(resumed, stage)
    told = np.concatenate([span.token_ids for span in watching.spans["9/0"]])
    np.testing.assert_array_equal(told, rollout.traces[0].token_ids)


async def test_a_rollout_is_scored_while_others_of_its_group_are_sampled() -> None:
    watching = Watching()
    engine = FakeEngine(version=1, lengths=[3, 10_000])
    stage = Stage({"w": watching})
    episodes = [episode(Script(done(None)), engine, index=i, max_tokens=20_000) for i in range(2)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, stage))
    await until(lambda: watching.order == ["9/0"])
    assert not running.done()
    await cancel_group(episodes, "enough")
    complete = await asyncio.wait_for(running, 60)
    assert [r.ending for r in complete.rollouts] == ["finished", "aborted"]
    assert [r.reward for r in complete.rollouts] == [1.0, None]


async def test_cancelling_a_group_ends_the_scoring_of_its_rollouts() -> None:
    watching = Watching()
    watching.hold = {"9/0": asyncio.Event()}
    stage, engine = Stage({"w": watching}), FakeEngine(version=1, lengths=[3, 4])
    episodes = [episode(Script(done(0.5)), engine, index=i) for i in range(2)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, stage))
    await until(lambda: len(watching.ended) == 2 and watching.order == ["9/1"])
    await cancel_group(episodes, "its lag is over the limit")
    complete = await asyncio.wait_for(running, 60)
    held, scored = complete.rollouts
    assert (held.ending, held.reason, held.reward) == ("aborted", "its lag is over the limit", None)
    assert held.scores == [] and held.trained_tokens == 3
    assert (scored.ending, scored.reward) == ("finished", 1.5)


async def test_a_straggler_is_cut_off_while_it_is_being_scored() -> None:
    watching = Watching()
    watching.hold = {"9/2": asyncio.Event()}
    stage, engine = Stage({"w": watching}), FakeEngine(version=1, lengths=[3])
    episodes = [episode(Script(done(None)), engine, index=i) for i in range(3)]
    await prepare_group(episodes)
    complete = await asyncio.wait_for(run_group(group(), episodes, stage, min_group=2, straggler_seconds=0.1), 60)
    assert [(r.ending, r.reason) for r in complete.rollouts] == [("finished", "")] * 2 + [("aborted", "straggler")]


@pytest.mark.parametrize("when", ["sampled", "scored"])
async def test_cancelling_the_task_ends_the_scoring_too(when: str) -> None:
    watching = Watching()
    watching.hold = {"9/0": asyncio.Event()}
    stage = Stage({"w": watching})
    engine = FakeEngine(version=1, lengths=[10_000] if when == "sampled" else [3])
    episodes = [episode(Script(done()), engine, max_tokens=20_000, scoring=stage)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, stage))
    await until(lambda: len(watching.ended) == 1 if when == "scored" else len(episodes[0].traces[0]) > 30)
    running.cancel()
    await asyncio.wait([running], timeout=60)
    assert running.cancelled()
    assert watching.forgotten == (["9/0"] if when == "sampled" else [])


async def test_rollouts_that_end_unscored_are_forgotten() -> None:
    watching = Watching()
    stage = Stage({"w": watching})
    failing, unused = (episode(Script(OSError("no")), id=id, scoring=stage) for id in ("9/0", "9/1"))
    await failing.prepare()
    await unused.prepare()
    assert (await run_episode(failing, stage)).reason == "environment.step: OSError: no"
    await unused.discard()
    assert watching.forgotten == ["9/0", "9/1"] and watching.ended == {}


async def test_held_out_answers_are_scored() -> None:
    stage = Stage({"w": Watching()})
    prompts = [Prompt(id="a", text="q"), Prompt(id="b", text="q")]
    run = {"version": 1, "moment": "after", "now": lambda: 0.0}

    def make(prompt: Prompt, sample: int) -> Episode:
        return episode(Script(done(None)), prompt=prompt)

    result, _, failed = await evaluate(prompts, make, stage, **run)
    assert (result.pass_1, failed) == (1.0, 0)
    result, answers, failed = await evaluate(prompts, make, Stage(), **run)
    assert (result.pass_1, failed) == (0.0, 2)
    assert answers[0].answer == "the environment ended the episode without a reward"
