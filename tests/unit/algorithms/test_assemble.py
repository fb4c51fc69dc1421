from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from headrace.algorithms.assemble import assemble, assemble_demonstrations
from headrace.types import NO_VERSION, Group, Prompt, Rollout, Trace


def trace(prompt, answer, version=3):
    n = len(answer)
    context = Trace.of_context(np.array(prompt, np.int32))
    return context.extended(
        np.array(answer, np.int32), -0.5 - np.arange(n), np.full(n, version, np.int32), trained=True
    )


def rollout(group, index, traces, reward, ending="finished"):
    return Rollout(id=f"{group}/{index}", index=index, traces=traces, reward=reward, ending=ending)


def two_groups():
    first = Group(
        id=4,
        prompt=Prompt(id="a", text="a"),
        version=3,
        rollouts=[
            rollout(4, 0, [trace([1, 2], [10])], 1.0),
            rollout(4, 1, [trace([1, 2], [11, 12, 13])], 0.0, "truncated"),
            rollout(4, 2, [trace([1, 2], [14])], None, "failed"),
        ],
    )
    second = Group(
        id=9,
        prompt=Prompt(id="b", text="b"),
        version=3,
        rollouts=[
            rollout(9, 0, [trace([5], [20, 21]), trace([6, 7], [22, 23])], 3.0),
            rollout(9, 1, [trace([5], [24, 25])], 1.0),
        ],
    )
    return [first, second]


def batch_of(groups, **changes):
    options = {
        "step": 7,
        "version": 5,
        "advantage": "dr_grpo",
        "normalize": "token",
        "group_size": 3,
        "max_tokens": 10,
        "temperature": 0.7,
    }
    return assemble(groups, **(options | changes))


def test_flat_arrays_by_hand():
    batch = batch_of(two_groups())
    assert batch.token_ids.tolist() == [1, 2, 10, 1, 2, 11, 12, 13, 5, 20, 21, 6, 7, 22, 23, 5, 24, 25]
    assert batch.lengths.tolist() == [3, 5, 3, 4, 3]
    assert batch.trained.astype(int).tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1]
    half, one = 0.5, 1.0
    assert batch.advantages.tolist() == [
        *(0, 0, half, 0, 0, -half, -half, -half),
        *(0, one, one, 0, 0, one, one, 0, -one, -one),
    ]
    assert batch.logprobs.tolist()[:8] == [0, 0, -0.5, 0, 0, -0.5, -1.5, -2.5]
    assert batch.versions.tolist()[:4] == [NO_VERSION, NO_VERSION, 3, NO_VERSION]
    assert set(batch.lags().tolist()) == {2}
    assert (batch.step, batch.version, batch.temperature, batch.objective) == (7, 5, 0.7, "policy")
    # The failed rollout is absent; the second trace of a rollout is not expected to begin like the first.
    assert batch.groups.tolist() == [0, 0, 1, 2, 1]
    assert batch.token_ids.dtype == batch.groups.dtype == batch.lengths.dtype == np.int32
    assert batch.advantages.dtype == batch.weights.dtype == np.float32


@pytest.mark.parametrize(
    ("normalize", "per_rollout"),
    [
        ("token", [1 / 10, 1 / 10, 1 / 10, 1 / 10]),
        ("sequence", [1 / 4, 1 / 12, 1 / 16, 1 / 8]),
        ("constant", [1 / 60, 1 / 60, 1 / 60, 1 / 60]),
    ],
)
def test_weights_by_hand(normalize, per_rollout):
    batch = batch_of(two_groups(), normalize=normalize)
    of_token = np.repeat(np.array(per_rollout)[[0, 1, 2, 2, 3]], batch.lengths)
    np.testing.assert_allclose(batch.weights, np.where(batch.trained, of_token, 0), rtol=1e-6)
    if normalize != "constant":
        assert batch.weights.sum() == pytest.approx(1.0)


def test_rewards_are_shaped_by_length_before_they_are_compared():
    # Lengths 1, 3, 4 and 2 of at most 4: the overlong punishment is 0, 1/2, 1 and 0; the reward itself stays.
    groups = two_groups()
    batch = batch_of(groups, max_tokens=4, overlong_buffer=2, overlong_penalty=4.0)
    per_trace = np.array([(1 - -2) / 2, (-2 - 1) / 2, (-1 - 1) / 2, (-1 - 1) / 2, (1 - -1) / 2])
    np.testing.assert_allclose(batch.advantages, np.where(batch.trained, np.repeat(per_trace, batch.lengths), 0))
    assert groups[1].rollouts[0].reward == 3.0
    batch = batch_of(groups, max_tokens=4, length_penalty=2.0)
    # 1 - 1/2 and 0 - 3/2; 3 - 2 and 1 - 1.
    per_trace = np.array([1.0, -1.0, 0.5, 0.5, -0.5])
    np.testing.assert_allclose(batch.advantages, np.where(batch.trained, np.repeat(per_trace, batch.lengths), 0))
    # Sampled tokens that are not trained, as a salvaged beginning is, are part of the length.
    groups[0].rollouts[1].traces[0].trained[2:4] = False
    np.testing.assert_allclose(batch_of(groups, max_tokens=4, length_penalty=2.0).advantages[7], -1.0)


def test_whitening_sees_every_group_of_the_step():
    batch = batch_of(two_groups(), advantage="reinforce_plus_plus")
    # Rewards 1, 0, 3, 1: mean 1.25, variance 1.1875; the third rollout has two traces.
    per_trace = (np.array([1, 0, 3, 3, 1]) - 1.25) / 1.1875**0.5
    expected = np.where(batch.trained, np.repeat(per_trace, batch.lengths), 0)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-5)


@pytest.mark.parametrize("advantage", ["dr_grpo", "reinforce_plus_plus"])
def test_order_of_arrival_does_not_matter(advantage):
    groups = two_groups()
    expected = msgspec.structs.asdict(batch_of(groups, advantage=advantage))
    for seed in range(5):
        random.Random(seed).shuffle(groups)
        for group in groups:
            random.Random(seed + 10).shuffle(group.rollouts)
        found = msgspec.structs.asdict(batch_of(groups, advantage=advantage))
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_a_rollout_without_reward_is_refused():
    groups = two_groups()
    groups[0].rollouts[1].reward = None
    with pytest.raises(ValueError, match="4/1 has not been judged"):
        batch_of(groups)


def test_groups_whose_rollouts_all_failed_leave_an_empty_batch():
    groups = two_groups()
    for group in groups:
        for each in group.rollouts:
            each.ending = "failed"
    batch = batch_of(groups)
    assert len(batch.token_ids) == batch.trained_tokens == len(batch.lengths) == 0


def test_demonstrations_by_hand():
    pairs = [(np.array([1, 2], np.int32), np.array([3], np.int32)), (np.array([4], np.int32), np.array([5, 6, 7]))]
    batch = assemble_demonstrations(pairs, step=2, version=0)
    assert batch.objective == "imitation"
    assert batch.temperature == 1.0
    assert batch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert batch.lengths.tolist() == [3, 4]
    assert batch.trained.tolist() == [False, False, True, False, True, True, True]
    assert batch.weights.tolist() == [0, 0, 0.25, 0, 0.25, 0.25, 0.25]
    assert batch.versions.tolist() == [NO_VERSION] * 7
    assert len(set(batch.groups.tolist())) == 2
