"""An episode that is continued from any of its prefixes is the episode that was never cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from rollout_parts import END, Script, TinyChat

from headrace.engines.base import Sampling
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.rollouts.base import EpisodePlan
from headrace.rollouts.turns import Episode
from headrace.tasks.base import EnvironmentStep
from headrace.types import Prompt, Rollout, Trace

ANSWERS = ("no", "warmer", "right")


def script(last: str = "right") -> Script:
    steps = [EnvironmentStep(messages=[{"role": "user", "content": text}], done=False) for text in ANSWERS[:2]]
    steps[1] = EnvironmentStep(messages=[{"role": "user", "content": last}], done=False)
    return Script(*steps, EnvironmentStep(done=True, reward=1.0))


async def play(saved: Sequence[Trace], environment: Script) -> tuple[Rollout, int, int]:
    """The rollout, how many saved tokens were discarded, and how many the engine sampled."""
    policy = FakePolicy(64)
    engine = FakeEngine(name="engine-0", policy=policy, slots=4, token_seconds=0.0)
    await engine.load(policy.manifest(0))
    sampling = Sampling(max_tokens=400, seed=3)
    plan = EpisodePlan(id="0/0", index=0, prompt=Prompt(id="p", text="x"), sampling=sampling, max_turns=8, saved=saved)
    episode = Episode(plan, environment, engine, TinyChat())
    await episode.prepare()
    rollout = await episode.run()
    sampled = engine.counters().generated_tokens
    await engine.close()
    return rollout, episode.discarded, sampled


def same(one: Trace, two: Trace) -> None:
    for name in ("token_ids", "trained", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), err_msg=name)


async def test_every_prefix_of_an_episode_leads_to_the_same_one() -> None:
    whole, _, all_sampled = await play([], script())
    (trace,) = whole.traces
    assert whole.reward == 1.0 and (trace.token_ids == END).sum() > 3
    # Wherever a token was sampled last: in a turn, at its end, or with the environment's answer after it.
    cuts = [n for n in range(len(trace) + 1) if n == 0 or trace.trained[n - 1] or n == len(trace) or trace.trained[n]]
    assert len(cuts) > 6
    for cut in cuts:
        environment = script()
        again, discarded, sampled = await play([trace.part(0, cut)], environment)
        same(again.traces[0], trace)
        assert (again.reward, again.ending, again.metrics) == (whole.reward, whole.ending, whole.metrics)
        assert discarded == 0
        assert sampled == all_sampled - trace.part(0, cut).trained_tokens, "what was saved is not sampled again"
        assert len(environment.heard) == 3, "the environment hears every turn"


async def test_an_environment_that_answers_otherwise_ends_the_use_of_what_was_saved() -> None:
    whole, _, _ = await play([], script())
    (trace,) = whole.traces
    again, discarded, _ = await play([trace], script("colder"))
    fresh, _, _ = await play([], script("colder"))
    same(again.traces[0], fresh.traces[0])
    context = np.flatnonzero(np.diff(trace.trained.astype(int)) == 1)
    last_turn = trace.part(int(context[2]) + 1, len(trace))
    assert discarded == last_turn.trained_tokens > 0


@pytest.mark.parametrize("opening", ["ho", "hi there"])
async def test_another_opening_discards_all(opening: str) -> None:
    whole, _, _ = await play([], script())
    environment = script()
    environment.opening = opening
    again, discarded, _ = await play(whole.traces, environment)
    assert discarded == whole.traces[0].trained_tokens
    assert again.reward == 1.0


async def test_several_traces_cannot_be_continued_and_are_all_discarded() -> None:
    whole, _, all_sampled = await play([], script())
    (trace,) = whole.traces
    half = trace.part(0, len(trace) // 2)
    again, discarded, sampled = await play([trace, half], script())
    same(again.traces[0], trace)
    assert discarded == trace.trained_tokens + half.trained_tokens
    assert sampled == all_sampled, "everything is sampled again"
