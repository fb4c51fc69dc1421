"""The window as a state machine under every order of events, beside a plain model of where each group is."""

from __future__ import annotations

import copy

import pytest
from groups_by_version import group
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.buffer import admission
from headrace.buffer.window import NO_SLOT, TOO_OLD, OnStale, Window
from headrace.errors import HeadraceError
from headrace.types import Rollout


class WindowMachine(RuleBasedStateMachine):
    """A pipeline without time: any group may end, any proof may arrive, whenever it can."""

    @initialize(
        groups=st.integers(1, 3),
        depth=st.integers(0, 3),
        publish_every=st.integers(1, 3),
        max_lag=st.none() | st.integers(0, 8),
        first_version=st.integers(0, 5),
        versions=st.none() | st.integers(1, 6),
    )
    def start(
        self, groups: int, depth: int, publish_every: int, max_lag: int | None, first_version: int, versions: int | None
    ) -> None:
        self.window = Window(groups, depth, publish_every, max_lag, first_version, versions)
        self.groups, self.publish_every, self.first_version, self.versions = (
            groups,
            publish_every,
            first_version,
            versions,
        )
        self.bound = admission.lag_bound(depth, groups, publish_every, max_lag)
        self.capacity = admission.capacity(depth, groups, publish_every, max_lag)
        self.synchronous = depth == 0 or max_lag == 0
        self.next_id = 0
        self.place: dict[int, str] = {}
        self.version: dict[int, int] = {}
        self.batches_before: dict[int, int] = {}
        self.batches = 0

    def at(self, *places: str) -> list[int]:
        return [group_id for group_id, place in self.place.items() if place in places]

    @precondition(lambda self: self.window.may_admit())
    @rule(count=st.integers(1, 12), ahead=st.integers(0, 3))
    def admit(self, count: int, ahead: int) -> None:
        for _ in range(min(count, self.window.free)):
            version = min(self.window.proved + ahead, self.window.trained_version)
            self.window.admit(self.next_id, version)
            self.place[self.next_id], self.version[self.next_id] = "in flight", version
            self.batches_before[self.next_id] = self.batches
            self.next_id += 1

    @rule(slow=st.integers(1, 4), rounds=st.integers(1, 8))
    def flow_past_slow_groups(self, slow: int, rounds: int) -> None:
        """Everything runs as fast as it may, except one of every few groups: what wears a window out."""
        for _ in range(rounds):
            if self.window.may_admit():
                self.admit(self.window.free, 0)
            for group_id in self.at("in flight"):
                if group_id % 5 >= slow:
                    self.finish(group_id)
            self.take()
            self.window.release(self.window.trained_version)
            self.something_can_always_move_once_groups_end()

    def finish(self, group_id: int) -> None:
        self.window.complete(group(group_id, self.version[group_id], self.window.trained_version))
        self.place[group_id] = "ready"

    @precondition(lambda self: self.at("in flight"))
    @rule(data=st.data(), how=st.sampled_from(["one", "youngest", "all but the oldest", "all"]))
    def complete(self, data: st.DataObject, how: str) -> None:
        flying = self.at("in flight")
        one = [data.draw(st.sampled_from(flying))] if how == "one" else []
        chosen = {"one": one, "youngest": flying[-1:], "all but the oldest": flying[1:], "all": flying}[how]
        for group_id in chosen:
            self.finish(group_id)

    @precondition(lambda self: self.at("in flight", "ready"))
    @rule(data=st.data(), failed=st.booleans())
    def lose(self, data: st.DataObject, failed: bool) -> None:
        group_id = data.draw(st.sampled_from(self.at("in flight", "ready")))
        (self.window.fail if failed else self.window.drop)(group_id)
        self.place[group_id] = "gone"

    @rule()
    def take(self) -> None:
        ready, unconsumed = self.at("ready"), self.at("ready", "in flight")
        version = self.first_version + self.batches // self.publish_every
        assert self.window.trained_version == version
        batch = self.window.take()
        if batch is None:
            return
        ids = [member.id for member in batch]
        assert ids == ready[: self.groups] and len(ids) == self.groups
        assert not self.synchronous or ids == unconsumed[: self.groups]
        for group_id in ids:
            lag = version - self.version[group_id]
            assert 0 <= lag <= self.bound
            waited = self.batches - self.batches_before[group_id]
            assert waited <= (2 * self.capacity - 2) // self.groups, "starved"
            self.place[group_id] = f"trained {version}"
        self.batches += 1

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(self.window.proved, self.window.trained_version))
        self.window.release(version)

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "window"):
            return
        held = [f"trained {v}" for v in range(self.window.proved, self.window.trained_version + 1)]
        assert self.window.in_flight == len(self.at("in flight"))
        assert self.window.ready == len(self.at("ready"))
        assert self.window.occupied == len(self.at("in flight", "ready", *held)) <= self.capacity
        assert "\n" not in self.window.explain()
        if self.versions is not None:
            live = len(self.place) - len(self.at("gone"))
            assert live <= self.versions * self.groups * self.publish_every

    @invariant()
    def something_can_always_move_once_groups_end(self) -> None:
        if not hasattr(self, "window"):
            return
        later = copy.deepcopy(self.window)
        for group_id in self.at("in flight"):
            later.complete(group(group_id, self.version[group_id]))
        later.release(later.trained_version)
        finished = self.versions is not None and self.batches == self.versions * self.publish_every
        assert later.may_admit() or later.take() is not None or finished, later.explain()


WindowMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestWindow = WindowMachine.TestCase


def test_depth_zero_gives_all_slots_of_a_fresh_version_and_no_more_until_it_is_proved() -> None:
    window = Window(groups=2, depth=0, publish_every=2)
    assert window.free == 4
    for group_id in range(4):
        window.admit(group_id, 0)
        window.complete(group(group_id, 0))
    assert [[g.id for g in window.take() or []] for _ in range(2)] == [[0, 1], [2, 3]]
    assert window.free == 0 and window.trained_version == 1
    assert "all 4 slots are taken" in window.explain() and "prove version 1" in window.explain()
    window.release(1)
    assert window.free == 4


def test_depth_zero_batches_do_not_depend_on_who_finished_first() -> None:
    window = Window(groups=1, depth=0, publish_every=2)
    window.admit(0, 0)
    window.admit(1, 0)
    window.complete(group(1, 0))
    assert window.take() is None
    assert "wait for group 0" in window.explain()
    window.complete(group(0, 0))
    assert [g.id for g in window.take() or []] == [0]


def test_a_full_window_still_fills_the_batch_of_the_group_it_waits_for() -> None:
    window = Window(groups=2, depth=1)
    for group_id in range(4):
        window.admit(group_id, 0)
    for group_id in (0, 2, 3):
        window.complete(group(group_id, 0))
    window.take()
    window.release(1)
    window.admit(4, 1)
    window.complete(group(4, 1))
    assert [g.id for g in window.take() or []] == [3, 4]
    window.release(2)
    assert window.free == 1  # 1, 2, 3 and 4 are the window of four, but group 1 cannot be trained alone
    window.admit(5, 2)
    window.complete(group(5, 2))
    assert window.free == 0 and "full behind group 1" in window.explain()
    assert "overtaken" in window.explain() and window.take() is None
    window.complete(group(1, 0))
    assert [g.id for g in window.take() or []] == [1, 5]


def test_a_group_with_tokens_over_max_lag_is_reported_as_stale_and_never_taken() -> None:
    window = Window(groups=1, depth=1, max_lag=1, first_version=5)
    window.admit(0, 5)
    window.complete(group(0, 3, 5))
    assert [g.id for g in window.stale()] == [0]
    with pytest.raises(HeadraceError, match="lag 2"):
        window.take()
    window.drop(0)
    assert window.stale() == [] and window.occupied == 0


def test_failed_rollouts_do_not_count_for_lag() -> None:
    window = Window(groups=1, depth=0, first_version=5)
    window.admit(0, 5)
    mixed = group(0, 5)
    mixed.rollouts.append(Rollout(id="0/1", index=1, traces=group(0, 1).rollouts[0].traces, ending="failed"))
    window.complete(mixed)
    assert window.take() == [mixed]


def test_what_is_out_of_order_raises() -> None:
    window = Window(groups=2, depth=0, first_version=1)
    window.admit(4, 1)
    with pytest.raises(HeadraceError, match="ids must increase"):
        window.admit(4, 1)
    with pytest.raises(HeadraceError, match="admitted at version 0"):
        window.admit(5, 0)
    window.admit(5, 1)
    with pytest.raises(HeadraceError, match="without a free slot"):
        window.admit(6, 1)
    with pytest.raises(HeadraceError, match="not in flight"):
        window.complete(group(6, 1))
    window.complete(group(4, 1))
    with pytest.raises(HeadraceError, match="not in flight"):
        window.complete(group(4, 1))
    window.complete(group(5, 1))
    window.take()
    with pytest.raises(HeadraceError, match="neither in flight nor ready"):
        window.drop(4)
    with pytest.raises(HeadraceError, match="version 3 was proved"):
        window.release(3)


def test_friction_53_a_restored_group_that_can_only_be_late_gets_no_slot() -> None:
    """Three groups of version 3 at version 7, two a batch: the third would be trained at version 8."""
    restored = [(10, 3), (11, 3), (12, 3), (13, 6), (14, 7)]
    window = Window(2, 2, max_lag=4, first_version=7)
    assert window.restore(restored, []) == {12: TOO_OLD}
    for group_id, version in ((10, 3), (11, 3), (13, 6), (14, 7)):
        window.complete(group(group_id, version))
    assert [[one.id for one in window.take() or []] for _ in range(2)] == [[10, 11], [13, 14]]

    window = Window(2, 1, first_version=7)
    assert window.lag_bound == 3 and window.restore(restored, []) == {10: TOO_OLD, 11: TOO_OLD, 12: TOO_OLD}
    window = Window(2, 0, first_version=7)
    assert window.restore([(13, 7), (14, 7), (15, 7), (16, 7)], []) == {15: TOO_OLD, 16: TOO_OLD}
    window = Window(2, "unbounded", max_lag=1, first_version=7, on_stale="drop")
    assert window.restore(restored, []) == {14: NO_SLOT}, "what is too old is dropped when it is due"


def test_friction_53_a_restored_group_over_the_bound_of_its_depth_is_stale() -> None:
    window = Window(2, 1, first_version=7, max_lag=8, on_stale="drop")
    window.restore([(10, 3), (11, 6)], [])
    for one in (group(10, 3), group(11, 6)):
        window.complete(one)
    assert [one.id for one in window.stale()] == [10], "max_lag allows lag 4, the depth only 3"


@given(
    groups=st.integers(1, 3),
    depth=st.integers(0, 3),
    publish_every=st.integers(1, 2),
    max_lag=st.none() | st.integers(0, 6),
    on_stale=st.sampled_from(["wait", "drop", "salvage"]),
    oversample=st.sampled_from([1.0, 2.0]),
    ages=st.lists(st.integers(0, 9), max_size=12),
    overtakers=st.sets(st.integers(0, 30), max_size=6),
)
def test_friction_53_restored_groups_of_any_age_never_block_or_exceed_the_bound(
    groups: int,
    depth: int,
    publish_every: int,
    max_lag: int | None,
    on_stale: OnStale,
    oversample: float,
    ages: list[int],
    overtakers: set[int],
) -> None:
    """`take` raises for a token over the bound. Every wait here is one for the window alone: all groups have ended."""
    window = Window(groups, depth, publish_every, max_lag, 9, on_stale=on_stale, oversample=oversample)
    restored = {2 * place: 9 - age for place, age in enumerate(sorted(ages, reverse=True))}
    refused = window.restore(restored.items(), {2 * other + 1 for other in overtakers})
    for group_id, version in restored.items():
        if group_id not in refused:
            window.complete(group(group_id, version))
    next_id = 100
    for _ in range(8 * publish_every):
        for stale in window.stale():
            window.drop(stale.id)
        for group_id in window.surplus():
            window.drop(group_id)
        for _ in range(window.free):
            window.admit(next_id, window.trained_version)
            window.complete(group(next_id, window.trained_version))
            next_id += 1
        assert window.take() is not None, window.explain()
        window.release(window.trained_version)
