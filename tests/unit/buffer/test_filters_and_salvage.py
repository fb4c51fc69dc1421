"""Filters and salvage on single groups, against what they say by hand; seats against counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer import admission
from headrace.buffer.filters import filter_group, masked, prefix_of
from headrace.buffer.window import NO_SLOT, Window
from headrace.types import Ending, Group, Prompt, Rollout, Trace


def trace(*versions: int) -> Trace:
    n = len(versions) + 2
    return Trace(
        token_ids=np.arange(n, dtype=np.int32),
        trained=np.array([False, False, *(v >= 0 for v in versions)]),
        logprobs=np.linspace(-1, -2, n).astype(np.float32),
        versions=np.array([-1, -1, *versions], np.int32),
    )


def rollout(index: int, reward: float | None, ending: Ending = "finished", reason: str = "") -> Rollout:
    return Rollout(id=f"7/{index}", index=index, traces=[trace(3, 3, 4)], ending=ending, reward=reward, reason=reason)


def group(*rollouts: Rollout) -> Group:
    return Group(id=7, prompt=Prompt(id="p", text="x"), version=3, rollouts=list(rollouts))


@pytest.mark.parametrize(
    ("rewards", "filters", "reason"),
    [
        ([1.0, 1.0, 1.0], ["zero_variance"], "zero_variance"),
        ([1.0, 1.0, 1.0], [], ""),
        ([1.0, 0.0, 1.0], ["zero_variance"], ""),
        ([0.5], ["overlong"], ""),
    ],
)
def test_groups_by_their_rewards(rewards, filters, reason) -> None:
    filtered = filter_group(group(*(rollout(i, reward) for i, reward in enumerate(rewards))), filters)
    assert (filtered.reason, filtered.removed, len(filtered.group.rollouts)) == (reason, {}, len(rewards))


def test_rollouts_leave_one_by_one() -> None:
    whole = group(
        rollout(0, 1.0), rollout(1, 0.0, "truncated"), rollout(2, 1.0), rollout(3, None, "aborted", "straggler"),
        rollout(4, None, "failed", "no judge"),
    )  # fmt: skip
    kept = filter_group(whole, [])
    assert kept.removed == {"7/3": "straggler"} and kept.reason == ""
    assert [r.index for r in kept.group.rollouts] == [0, 1, 2, 4]
    both = filter_group(whole, ["zero_variance", "overlong"])
    assert both.removed == {"7/1": "overlong", "7/3": "straggler"}
    assert both.reason == "zero_variance", "what is left has one reward only"
    assert len(whole.rollouts) == 5


def test_a_group_with_too_few_left_is_filtered_only_where_a_filter_did_it() -> None:
    short = filter_group(group(rollout(0, 1.0), rollout(1, 0.0, "truncated")), ["overlong"])
    assert short.reason == "overlong"
    failed = filter_group(group(rollout(0, 1.0), rollout(1, None, "failed", "x")), ["overlong", "zero_variance"])
    assert failed.reason == "" and len(failed.group.usable) == 1


def test_masks_change_what_is_trained_and_nothing_else() -> None:
    before = group(rollout(0, 1.0), rollout(1, 0.0))
    after = masked(before, 4)
    for old, new in zip(before.rollouts, after.rollouts, strict=True):
        assert new.traces[0].trained.tolist() == [False, False, False, False, True]
        assert old.traces[0].trained.tolist() == [False, False, True, True, True]
        for name in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(new.traces[0], name), getattr(old.traces[0], name))
        assert (new.sampled_tokens, new.trained_tokens, new.reward) == (3, 1, old.reward)


def test_only_a_first_turn_that_was_cut_off_can_be_gone_on_from() -> None:
    cut = Rollout(id="7/0", index=0, traces=[trace(3, 4)], ending="aborted", reason="stale", metrics={"turns": 0.0})
    prefix = prefix_of(cut)
    assert prefix is not None and not prefix.trained.any()
    np.testing.assert_array_equal(prefix.versions, cut.traces[0].versions)
    np.testing.assert_array_equal(prefix.logprobs, cut.traces[0].logprobs)
    assert cut.traces[0].trained.sum() == 2
    for changes in ({"ending": "finished"}, {"metrics": {"turns": 1.0}}, {"traces": [trace()]}, {"metrics": {}}):
        fields = {name: getattr(cut, name) for name in cut.__struct_fields__} | changes
        assert prefix_of(Rollout(**fields)) is None


@given(
    st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(1, 30), st.integers(1, 10),
    st.integers(0, 20), st.floats(0, 1), st.integers(0, 20),
)  # fmt: skip
def test_oversampling_admits_what_fits_when_the_expected_are_gone(
    occupied: int, span: int, unconsumed: int, capacity: int, groups: int, in_flight: int, rate: float, spares: int
) -> None:
    def fits(count: int) -> bool:
        lost = min(spares, int(rate * (in_flight + count)))
        window = span + count - lost <= capacity or unconsumed + count <= groups
        return occupied + count - lost <= capacity and window

    found = admission.admissible(
        occupied, span, unconsumed, capacity, groups, in_flight=in_flight, filtered=rate, spares=spares
    )
    assert found == 0 or fits(found)
    assert not fits(found + 1)
    plain = admission.admissible(occupied, span, unconsumed, capacity, groups)
    assert plain == max(0, min(capacity - occupied, max(capacity - span, groups - unconsumed))) <= found


def test_a_spare_group_takes_the_seat_of_one_that_is_filtered_and_leaves_if_nobody_is() -> None:
    def done(group_id: int, version: int) -> Group:
        whole = group(rollout(0, 1.0))
        whole.rollouts[0].traces = [trace(version)]
        return Group(id=group_id, prompt=whole.prompt, version=version, rollouts=whole.rollouts)

    window = Window(groups=2, depth=0, oversample=2.0)
    for group_id in range(2):
        window.admit(group_id, 0)
    window.filter(0)
    window.admit(2, 0)
    for group_id in (1, 2):
        window.complete(done(group_id, 0))
    assert [g.id for g in window.take() or []] == [1, 2]
    assert window.filtered_rate == pytest.approx(1 / 3)
    window.release(1)
    assert window.free == 3, "two slots, and one of three is expected to leave"
    for group_id in (3, 4, 5):
        window.admit(group_id, 1)
    assert window.free == 0
    for group_id in (3, 5):
        window.complete(done(group_id, 1))
    assert window.surplus() == [] and window.take() is None, "4 may still leave"
    window.complete(done(4, 1))
    assert window.surplus() == [5]
    window.drop(5)
    assert [g.id for g in window.take() or []] == [3, 4]


@given(st.lists(st.booleans(), min_size=1, max_size=10), st.integers(0, 4))
def test_versions_are_on_time_by_the_weights_that_they_stand_for(again: list[bool], max_lag: int) -> None:
    """Versions in order, each either newly trained or published again; lag counts the trained ones."""
    republished = [version for version, same in enumerate(again, start=1) if same]
    newest = len(again)
    oldest = admission.oldest_on_time(newest, max_lag, republished)
    for version in range(newest + 1):
        lag = sum(not again[later - 1] for later in range(version + 1, newest + 1))
        assert (version >= oldest) == (lag <= max_lag)


def test_groups_of_an_earlier_life_take_spare_slots_and_seats_by_age() -> None:
    window = Window(1, 0, first_version=5, oversample=2.0, republished=[5])
    assert window.restore([(3, 4), (4, 4), (5, 4)], []) == {5: NO_SLOT}, "one slot and one spare"
    rollouts = [Rollout(id="4/0", index=0, traces=[trace(4)], ending="finished", reward=1.0)]
    window.complete(Group(id=4, prompt=Prompt(id="p", text="x"), version=4, rollouts=rollouts))
    assert window.take() is None and window.surplus() == [], "the older one may still leave"
    window.filter(3)
    taken = window.take()
    assert taken is not None and [one.id for one in taken] == [4]
