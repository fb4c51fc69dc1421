"""The distance of two samples by definition, and when it is worth a line."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.metrics import FEWEST, LengthDrift, ks_distance
from headrace.observe.records import EndedGroup
from headrace.review.summary import outcomes, quarters

SAMPLES = st.lists(st.integers(0, 30), min_size=1, max_size=40)


@given(SAMPLES, SAMPLES)
def test_the_distance_is_the_largest_gap_of_the_distribution_functions(first: list[int], second: list[int]) -> None:
    def share(sample: list[int], x: int) -> float:
        return sum(value <= x for value in sample) / len(sample)

    expected = max(abs(share(first, x) - share(second, x)) for x in range(31))
    assert abs(ks_distance(np.array(first), np.array(second)) - expected) < 1e-12


def test_a_warning_is_said_once_and_again_only_after_it_was_well() -> None:
    drift = LengthDrift()
    rng = np.random.default_rng(0)

    def step(cut: int) -> str | None:
        lengths = rng.integers(1, 101, FEWEST)
        drift.ended(lengths.tolist(), [int(length) for length in lengths if length <= cut])
        return drift.warning()

    assert [step(100) for _ in range(4)] == [None] * 4
    lines = [step(60) for _ in range(12)]
    [line] = [line for line in lines if line]
    assert "trained answers are not like the generated ones" in line and "\n" not in line
    assert drift.distance() is not None and drift.distance() > 0.3
    assert [step(100) for _ in range(12)] == [None] * 12
    assert any(step(50) for _ in range(8))


def test_too_few_rollouts_say_nothing() -> None:
    drift = LengthDrift()
    drift.ended(range(1000), range(FEWEST - 1))
    assert drift.distance() is None and drift.warning() is None


def test_lengths_that_change_fast_are_no_difference_if_all_are_trained() -> None:
    drift = LengthDrift()
    for step in range(40):
        lengths = [200 - 4 * step + place for place in range(32)]
        drift.ended(lengths, lengths)
        assert drift.warning() is None
    assert drift.distance() == 0.0


def test_groups_fall_into_quarters_and_outcomes() -> None:
    def group(tokens: float | None, state: str = "trained", reason: str = "") -> EndedGroup:
        return EndedGroup(id=0, state=state, reason=reason, seconds=None, tokens=tokens, reward=None, age=None)

    groups = [group(float(n), "trained" if n < 6 else "dropped", "" if n < 6 else "stale") for n in range(8)]
    parts = quarters([*groups, group(None, "failed", "x")], "tokens")
    assert [(name, len(part)) for name, part in parts] == [("0 to 1", 2), ("2 to 3", 2), ("4 to 5", 2), ("6 to 7", 2)]
    assert [(name, len(part)) for name, part in outcomes(groups)] == [("trained", 6), ("stale", 2)]
    assert quarters([group(1.0)] * 5, "tokens")[0][0] == "1"
    assert quarters([], "tokens") == []
