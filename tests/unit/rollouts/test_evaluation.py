from __future__ import annotations

import asyncio

import pytest
from rollout_parts import Script, done, episode

from headrace.config.evaluate import MeasuredSection
from headrace.engines.fake import FakeEngine
from headrace.observe.records import EvaluationRecord, SampleRecord
from headrace.pipeline.episodes import evaluate
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.types import Prompt
from lengths import lognormal_lengths

PROMPTS = [Prompt(id=f"p{i}", messages=[{"role": "user", "content": f"what is {i}?"}]) for i in range(5)]
RUN = {"version": 7, "moment": "during", "now": lambda: 1.5}


async def test_the_figures_are_those_of_the_rewards() -> None:
    rewards: dict[str, list[float | Exception]] = {
        "p0": [1.0, 0.0, 0.0, 0.0],
        "p1": [0.0, 0.99, 0.0, 0.5],
        "p2": [1.0, 1.0, 2.0, 1.0],
        "p3": [RuntimeError("broken"), 1.0, 0.0, 1.0],
        "p4": [0.0, 0.0, 0.0, 0.0],
    }
    engine = FakeEngine(version=1, lengths=[4])

    def make(prompt: Prompt, sample: int) -> Episode:
        reward = rewards[prompt.id][sample]
        environment = Script(reward if isinstance(reward, Exception) else done(reward))
        return episode(environment, engine, prompt=prompt, id=f"{prompt.id}/{sample}")

    evaluation = evaluate(PROMPTS, make, Stage(), **RUN, measured=MeasuredSection(samples=4), concurrency=3)
    result, answers, failed = await asyncio.wait_for(evaluation, 60)
    assert (result.prompts, result.samples, failed) == (5, 4, 1)
    assert (result.version, result.moment, result.started, result.ended) == (7, "during", 1.5, 1.5)
    assert result.pass_1 == pytest.approx((1 + 0 + 4 + 2 + 0) / 20)
    assert result.pass_k == pytest.approx(3 / 5)
    assert result.reward_mean == pytest.approx((1 + 1.49 + 5 + 2) / 20)
    assert result.tokens_mean == 4
    assert [(a.prompt, a.question, a.reward) for a in answers] == [
        ("p0", "what is 0?", 1.0),
        ("p1", "what is 1?", 0.0),
        ("p2", "what is 2?", 1.0),
        ("p3", "what is 3?", 0.0),
        ("p4", "what is 4?", 0.0),
    ]
    assert answers[3].answer == "environment.step: RuntimeError: broken"
    assert answers[0].answer.endswith("<63>") and answers[0].answer.count("<") == 4


async def test_no_more_episodes_are_in_flight_than_allowed_and_the_result_does_not_depend_on_it() -> None:
    async def run(concurrency: int) -> tuple[tuple[EvaluationRecord, list[SampleRecord], int], int]:
        engine = FakeEngine(version=1, lengths=lognormal_lengths(20))
        most = 0

        class Watching(Script):
            async def step(self, completion: str) -> object:  # type: ignore[override]
                nonlocal most
                stats = engine.counters()
                most = max(most, stats.running + stats.waiting + 1)
                return done(float(len(completion) % 3))

        def make(prompt: Prompt, sample: int) -> Episode:
            seed = 10 * sample + PROMPTS.index(prompt)
            return episode(Watching(), engine, prompt=prompt, seed=seed, id=f"{prompt.id}/{sample}")

        evaluation = evaluate(
            PROMPTS, make, Stage(), **RUN, measured=MeasuredSection(samples=3), concurrency=concurrency
        )
        return await asyncio.wait_for(evaluation, 60), most

    (one, most_one), (four, most_four) = await run(1), await run(4)
    assert one == four
    assert (most_one, most_four) == (1, 4)
