"""The lag bound: never exceeded by any schedule, and attained by one, for every small configuration."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from groups_by_version import group
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer import admission
from headrace.buffer.window import Window
from headrace.errors import HeadraceError

SETTINGS = list(itertools.product(range(4), (1, 2, 3), (1, 2, 3), (None, 0, 1, 2, 3, 4, 9)))


def worst_lag_of_a_held_group(window: Window) -> int:
    """Fill the window, then let everybody overtake its last group for as long as the window allows."""
    ids = itertools.count()
    held = window.capacity - 1
    for _ in range(100 * window.capacity):
        if window.may_admit():
            group_id = next(ids)
            window.admit(group_id, window.proved)
            if group_id != held:
                window.complete(group(group_id, window.proved))
            continue
        version = window.trained_version
        if window.take() is None:
            window.complete(group(held, window.first_version))
            batch = window.take()
            while batch is None:
                window.admit(group_id := next(ids), window.proved)
                window.complete(group(group_id, window.proved))
                batch = window.take()
            assert held in [member.id for member in batch]
            return version - window.first_version
        window.release(window.trained_version)
    raise AssertionError("the held group was never needed")


@pytest.mark.parametrize(("depth", "groups", "publish_every", "max_lag"), SETTINGS)
def test_the_bound_is_attained(depth: int, groups: int, publish_every: int, max_lag: int | None) -> None:
    window = Window(groups, depth, publish_every, max_lag, first_version=3)
    assert worst_lag_of_a_held_group(window) == admission.lag_bound(depth, groups, publish_every, max_lag)


@pytest.mark.parametrize(
    ("depth", "groups", "publish_every", "max_lag", "bound", "capacity"),
    [
        (0, 16, 1, None, 0, 16),
        (0, 16, 2, 5, 0, 32),
        (1, 16, 1, None, 3, 32),
        (1, 1, 1, None, 2, 2),
        (2, 16, 1, None, 5, 48),
        (2, 16, 1, 2, 2, 48),
        (4, 16, 1, 2, 2, 48),
        (4, 16, 1, 0, 0, 16),
        (1, 16, 1, 9, 3, 32),
        (1, 16, 1, 1, 1, 32),
        (2, 16, 1, 4, 4, 48),
        (4, 16, 1, None, 9, 80),
        (1, 8, 4, None, 3, 64),
    ],
)
def test_the_table_of_the_documentation(
    depth: int, groups: int, publish_every: int, max_lag: int | None, bound: int, capacity: int
) -> None:
    assert admission.lag_bound(depth, groups, publish_every, max_lag) == bound
    assert admission.capacity(depth, groups, publish_every, max_lag) == capacity


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SETTINGS), st.integers(0, 2**32), st.floats(0, 0.95), st.floats(0, 0.2))
def test_no_schedule_exceeds_the_bound(
    setting: tuple[int, int, int, int | None], seed: int, slowness: float, dropping: float
) -> None:
    """Random schedules, judged from outside the window: slow groups, late proofs, drops, failures."""
    chance = random.Random(seed)
    depth, groups, publish_every, max_lag = setting
    window = Window(groups, depth, publish_every, max_lag)
    bound = admission.lag_bound(*setting)
    flying: dict[int, int] = {}
    ids, batches = itertools.count(), 0
    for _ in range(300):
        if window.may_admit():
            flying[group_id := next(ids)] = window.proved
            window.admit(group_id, window.proved)
        elif flying and chance.random() > slowness:
            # Young groups first: the schedule that hurts the old ones most.
            group_id = max(flying) if chance.random() < 0.7 else chance.choice(sorted(flying))
            version = flying.pop(group_id)
            if chance.random() < dropping:
                chance.choice([window.drop, window.fail])(group_id)
            else:
                window.complete(group(group_id, version))
        if (batch := window.take()) is not None:
            version, batches = batches // publish_every, batches + 1
            assert all(version - member.version <= bound for member in batch)
        if chance.random() > slowness:
            window.release(window.trained_version)
    for group_id, version in flying.items():
        window.complete(group(group_id, version))
    window.release(window.trained_version)
    assert window.may_admit() or window.take() is not None, window.explain()


def test_pacing_waits_when_many_groups_fall_due_together() -> None:
    """One slow group could still be late later, when another one is due at the same time."""
    window = Window(groups=1, depth=2, max_lag=2)
    for group_id in range(3):
        window.admit(group_id, 0)
    window.complete(group(0, 0))
    assert window.take() is not None
    window.release(1)
    window.admit(3, 1)
    window.complete(group(3, 1))
    assert window.take() is None  # 1 and 2 both have to be trained by version 2, and it has one place
    assert "wait for group 1" in window.explain() and "max_lag = 2" in window.explain()
    window.complete(group(1, 0))
    assert [member.id for member in window.take() or []] == [1]


@given(st.integers(0, 20), st.integers(1, 5), st.integers(0, 4), st.lists(st.integers(0, 6), max_size=8))
def test_on_time_is_the_feasibility_of_deadlines(consumed: int, size: int, max_lag: int, left: list[int]) -> None:
    """Against counting places per deadline: of those due by version d, no more than the places up to its end."""
    left = sorted(left)
    due = {version + max_lag for version in left}
    expected = all(sum(v + max_lag <= d for v in left) <= max(0, size * (d + 1) - consumed) for d in due)
    assert admission.on_time(consumed, left, size, max_lag) == expected


def test_check_lag_raises_on_the_first_token_out_of_bounds() -> None:
    admission.check_lag(5, np.array([3, 5], np.int32), 2)
    admission.check_lag(5, np.array([], np.int32), 0)
    with pytest.raises(HeadraceError, match=r"lag 3 .* at version 5, the bound is 2"):
        admission.check_lag(5, np.array([5, 2, 5], np.int32), 2)
    with pytest.raises(HeadraceError, match=r"token of lag -1 .* at version 5"):
        admission.check_lag(5, np.array([5, 6], np.int32), 2)
