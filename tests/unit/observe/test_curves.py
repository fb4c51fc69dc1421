"""The curves of a step, by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.observe.curves import MOST_NAMES, Pace, of_answers, of_tasks
from headrace.types import Ending, Group, Prompt, Rollout, Score, Trace


def rollout(reward: float | None, tokens: int, ending: Ending = "finished", **metrics: float) -> Rollout:
    trace = Trace(
        token_ids=np.zeros(tokens, np.int32),
        trained=np.ones(tokens, np.bool_),
        logprobs=np.zeros(tokens, np.float32),
        versions=np.zeros(tokens, np.int32),
    )
    scores = [] if reward is None else [Score(value=reward - 1.0, scorer="format"), Score(value=1.0, scorer="right")]
    return Rollout(
        id="0/0", index=0, traces=[trace], ending=ending, reward=reward, metrics=metrics, scores=scores, reason=""
    )


def group(*rollouts: Rollout) -> Group:
    return Group(id=0, prompt=Prompt(id="p", text="?"), version=0, rollouts=list(rollouts))


def test_the_answers_of_a_step() -> None:
    groups = [
        group(rollout(1.0, 3, turns=1.0), rollout(0.0, 5, "truncated", turns=3.0), rollout(None, 7, "failed")),
        group(rollout(0.5, 8), rollout(0.5, 4)),
    ]
    found = of_answers(groups, np.array([-0.5, -1.5], np.float32))
    assert found == {
        "reward_min": 0.0,
        "reward_max": 1.0,
        "reward_std": 0.25,
        "zero_variance": 0.5,
        "length_mean": 5.0,
        "length_max": 8,
        "truncated": 0.25,
        "sampled_entropy": 1.0,
        "score/format": -0.5,
        "score/right": 1.0,
        "extra/turns": 2.0,
    }


def test_each_of_several_tasks_has_curves_of_its_own() -> None:
    def of(task: str, value: float, tokens: int) -> Group:
        scores = [Score(value=value, scorer=f"{task}/reward"), Score(value=2.0, scorer="judge")]
        answer = msgspec.structs.replace(rollout(value, tokens), scores=scores)
        answer.traces[0].logprobs[:] = -value
        prompt = Prompt(id=f"{task}/0", text="?", task=task)
        return Group(id=0, prompt=prompt, version=0, rollouts=[answer, rollout(None, 9, "failed")])

    assert of_tasks([group(rollout(1.0, 3))]) == {}
    found = of_tasks([of("math", 1.0, 2), of("math", 0.5, 2), of("code", 0.25, 6)])
    assert {key for key in found if key.startswith("math/")} == {
        f"math/{key[5:]}" for key in found if key[:5] == "code/"
    }
    assert len(found) == 2 * sum(key.startswith("math/") for key in found)
    assert (found["math/groups"], found["code/groups"]) == (2, 1)
    assert (found["math/reward"], found["code/reward"]) == (0.75, 0.25)
    assert (found["math/score/reward"], found["math/score/judge"]) == (0.75, 2.0)
    assert (found["code/length_mean"], found["code/sampled_entropy"], found["math/sampled_entropy"]) == (6, 0.25, 0.75)


def test_a_step_without_answers_has_no_numbers() -> None:
    assert set(of_answers([], np.zeros(0, np.float32)).values()) == {None}


def test_invented_names_are_bounded() -> None:
    many = [rollout(0.0, 1, **{f"name{index}": 1.0}) for index in range(MOST_NAMES + 9)]
    found = of_answers([group(*many)], np.zeros(1, np.float32))
    assert sum(key.startswith("extra/") for key in found) == MOST_NAMES


def test_shares_and_rates_are_of_the_time_between_two_steps() -> None:
    pace = Pace()
    pace.beat("engine-0", 100.0, 0.0, 0)  # Before the run began.
    pace.begin(10.0)
    pace.beat("engine-0", 2.0, 1.0, 50)
    pace.beat("engine-1", 2.0, 2.0, 150)
    pace.beat("trainer-0", 2.0, 0.5, 0)
    pace.beat("gateway-0", 2.0, 2.0, 0)
    first = pace.step(14.0, 400)
    assert first == {
        "engine_idle": 0.25,
        "trainer_idle": 0.75,
        "generated_per_second": 100.0,
        "tokens_per_second": 100.0,
    }
    assert pace.step(15.0, 50) == {**first, "tokens_per_second": 50.0}, "no heartbeat: the shares before"
    pace.begin(99.0)
    pace.beat("trainer-0", 1.0, 1.0, 0)
    assert pace.step(16.0, 1)["trainer_idle"] == pytest.approx(0.0)
