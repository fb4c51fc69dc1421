from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.advantages import ADVANTAGES, EPSILON, advantages
from headrace.config.schema import AlgorithmConfig, names_of

# Rewards as they occur: a few digits, so that a spread is either nothing or well above rounding.
REWARDS = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=1, max_size=16)
NAMES = st.sampled_from(sorted(ADVANTAGES))


def of_group(name, rewards):
    """The advantages of a step that has one group."""
    [found] = advantages(name, [rewards])
    return found


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("dr_grpo", [1, 2, 6], [-2, -1, 3]),
        ("grpo", [1, 0, 0, 1], [1, -1, -1, 1]),
        ("grpo", [0, 0, 0, 4], [-(3**-0.5), -(3**-0.5), -(3**-0.5), 3**0.5]),
        ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("rloo", [1, 2, 6], [-3, -1.5, 4.5]),
        ("rloo", [5], [0]),
        ("grpo", [5], [0]),
        ("dr_grpo", [5], [0]),
        ("grpo", [], []),
        # The mean of these is not exactly 0.1: rounding must not become an advantage.
        ("grpo", [0.1] * 7, [0] * 7),
        # One right answer of four weighs three times the mean, all right ones nothing.
        ("maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("maxrl", [1, 1, 1, 0], [1 / 3, 1 / 3, 1 / 3, -1]),
        ("maxrl", [1, 2, 6], [-2 / 3, -1 / 3, 1]),
        ("maxrl", [0, 0], [0, 0]),
        ("maxrl", [-1, 0], [0, 0]),
        ("maxrl", [1, -1], [0, 0]),
        ("maxrl", [0.1] * 7, [0] * 7),
        ("maxrl", [], []),
        ("reinforce_plus_plus", [1, 0, 0, 1], [1, -1, -1, 1]),
    ],
)
def test_hand_computed(name, rewards, expected):
    found = of_group(name, rewards)
    assert found.shape == (len(expected),)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * EPSILON)


def test_reinforce_plus_plus_whitens_the_whole_step():
    groups = [[4, 4], [0], [], [0, 2, 2]]
    # Of all six: mean 2, variance (4 + 4 + 4 + 4) / 6.
    unit = 2 / (16 / 6) ** 0.5
    expected = [[unit, unit], [-unit], [], [-unit, 0, 0]]
    found = advantages("reinforce_plus_plus", groups)
    assert len(found) == 4
    for values, by_hand in zip(found, expected, strict=True):
        np.testing.assert_allclose(values, by_hand, rtol=0, atol=4 * EPSILON)
    assert advantages("reinforce_plus_plus", []) == []
    [alike, also] = advantages("reinforce_plus_plus", [[0.1, 0.1], [0.1]])
    assert not alike.any() and not also.any()


@given(st.sampled_from(sorted(set(ADVANTAGES) - {"reinforce_plus_plus"})), st.lists(REWARDS, max_size=4))
def test_other_groups_do_not_matter_to_those_that_compare_within_one(name, groups):
    for rewards, found in zip(groups, advantages(name, groups), strict=True):
        np.testing.assert_array_equal(found, of_group(name, rewards))


@given(REWARDS)
def test_rloo_is_reward_minus_mean_of_the_others(rewards):
    found = of_group("rloo", rewards)
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-9)


@given(NAMES, st.lists(REWARDS, min_size=1, max_size=4))
def test_sums_to_zero(name, groups):
    found = advantages(name, groups)
    # Where the mean is next to nothing, maxrl magnifies rounding with everything else.
    scale = max(1.0, *(float(np.abs(values).max()) for values in found))
    assert abs(sum(values.sum() for values in found)) < 1e-6 * scale


@given(NAMES.filter(lambda name: name != "maxrl"), REWARDS, st.integers(-50, 50))
def test_adding_a_constant_changes_nothing(name, rewards, shift):
    shifted = [reward + shift for reward in rewards]
    np.testing.assert_allclose(of_group(name, shifted), of_group(name, rewards), atol=1e-6)


@given(NAMES, REWARDS, st.sampled_from([0.25, 2.0, 16.0]))
def test_scale(name, rewards, scale):
    scaled = of_group(name, [reward * scale for reward in rewards])
    free = name in ("grpo", "reinforce_plus_plus", "maxrl")
    expected = of_group(name, rewards) * (1.0 if free else scale)
    np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-9)


@given(NAMES, st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=1, max_size=16), st.randoms())
def test_follows_a_reordering(name, rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    reordered = of_group(name, [rewards[i] for i in order])
    np.testing.assert_allclose(reordered, of_group(name, rewards)[order], atol=1e-9)


@given(REWARDS.filter(lambda rewards: len(set(rewards)) > 1))
def test_grpo_has_unit_spread(rewards):
    assert of_group("grpo", rewards).std() == pytest.approx(1.0, abs=1e-4)


def test_every_name_of_the_configuration_is_there_and_no_other():
    assert set(names_of(AlgorithmConfig, "advantage")) == set(ADVANTAGES)


def test_imports_without_torch():
    program = (
        "import sys, headrace.algorithms.assemble, headrace.training.rows, headrace.training.checkpoints.base, "
        "headrace.training.base; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
