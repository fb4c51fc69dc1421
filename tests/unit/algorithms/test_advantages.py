from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.advantages import ADVANTAGES, EPSILON, advantages

# Rewards as they occur: a few digits, so that a spread is either nothing or well above rounding.
REWARDS = st.lists(st.integers(-1000, 1000).map(lambda n: n / 8), min_size=1, max_size=16)
NAMES = st.sampled_from(sorted(ADVANTAGES))


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
    ],
)
def test_hand_computed(name, rewards, expected):
    found = advantages(name, rewards)
    assert found.shape == (len(expected),)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * EPSILON)


@given(REWARDS)
def test_rloo_is_reward_minus_mean_of_the_others(rewards):
    found = advantages("rloo", rewards)
    for i, reward in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        expected = reward - sum(others) / len(others) if others else 0.0
        assert found[i] == pytest.approx(expected, abs=1e-9)


@given(NAMES, REWARDS)
def test_sums_to_zero(name, rewards):
    assert abs(advantages(name, rewards).sum()) < 1e-6


@given(NAMES, REWARDS, st.integers(-50, 50))
def test_adding_a_constant_changes_nothing(name, rewards, shift):
    shifted = [reward + shift for reward in rewards]
    np.testing.assert_allclose(advantages(name, shifted), advantages(name, rewards), atol=1e-6)


@given(NAMES, REWARDS, st.sampled_from([0.25, 2.0, 16.0]))
def test_scale(name, rewards, scale):
    scaled = advantages(name, [reward * scale for reward in rewards])
    expected = advantages(name, rewards) * (1.0 if name == "grpo" else scale)
    np.testing.assert_allclose(scaled, expected, rtol=1e-3, atol=1e-9)


@given(NAMES, REWARDS, st.randoms())
def test_follows_a_reordering(name, rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    reordered = advantages(name, [rewards[i] for i in order])
    np.testing.assert_allclose(reordered, advantages(name, rewards)[order], atol=1e-9)


@given(REWARDS.filter(lambda rewards: len(set(rewards)) > 1))
def test_grpo_has_unit_spread(rewards):
    assert advantages("grpo", rewards).std() == pytest.approx(1.0, abs=1e-4)


def test_imports_without_torch():
    program = (
        "import sys, headrace.algorithms.assemble, headrace.training.packing, headrace.training.checkpoint, "
        "headrace.training.report; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
