"""The window with every option, under every order of events, judged by a plain model and by the ledgers.

All depths, waiting, dropping and salvage, filters with refill and oversampling, cancelled groups, a crash at any point.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from groups_by_version import group
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.buffer import admission
from headrace.buffer.ledger import Ledgers
from headrace.buffer.window import Window


class BufferMachine(RuleBasedStateMachine):
    """A run without time. `tokens` holds the versions that a group's tokens were sampled with so far."""

    @initialize(
        groups=st.integers(1, 3),
        depth=st.integers(0, 3) | st.just("unbounded"),
        publish_every=st.integers(1, 2),
        max_lag=st.none() | st.integers(0, 6),
        on_stale=st.sampled_from(["wait", "drop", "salvage"]),
        oversample=st.sampled_from([1.0, 1.0, 1.5, 2.0, 3.0]),
        versions=st.none() | st.integers(2, 8),
    )
    def start(self, **given: Any) -> None:
        if given["depth"] == "unbounded" or given["on_stale"] != "wait":
            given["max_lag"] = 1 if given["max_lag"] is None else given["max_lag"]
        self.given = given
        self.ledgers = Ledgers()
        self.next_id = 0
        self.published = -1
        self.versions_left = given["versions"]
        self.open_window()

    def open_window(self) -> None:
        """A new window, as a run makes it from the journal's record: what was published, and what is left to train."""
        given = {**self.given, "versions": self.versions_left}
        self.window = Window(**given, first_version=self.published + 1)
        self.published += 1
        setting = [given[key] for key in ("depth", "groups", "publish_every", "max_lag")]
        self.bound, self.capacity = admission.lag_bound(*setting), admission.capacity(*setting)
        self.spares = int((given["oversample"] - 1) * self.capacity)
        self.synchronous = admission.effective_depth(given["depth"], given["max_lag"]) == 0
        self.batches = 0
        self.tokens: dict[int, list[int]] = {}
        self.place: dict[int, str] = {}
        self.batches_before: dict[int, int] = {}

    def at(self, *places: str) -> list[int]:
        return [group_id for group_id, place in self.place.items() if place in places]

    def over(self) -> bool:
        return self.versions_left is not None and self.batches == self.versions_left * self.given["publish_every"]

    def leave(self, group_id: int, reason: str) -> None:
        how = {"filtered": self.window.filter, "failed": self.window.fail}.get(reason, self.window.drop)
        how(group_id)
        self.place[group_id] = "gone"
        self.ledgers.group_ended(group_id, "failed" if reason == "failed" else "dropped", reason)

    @precondition(lambda self: self.window.may_admit())
    @rule(count=st.integers(1, 12))
    def admit(self, count: int) -> None:
        for _ in range(min(count, self.window.free)):
            self.window.admit(self.next_id, self.window.proved)
            self.ledgers.admitted(self.next_id, [f"{self.next_id}/0"])
            self.place[self.next_id], self.tokens[self.next_id] = "in flight", [self.window.proved]
            self.batches_before[self.next_id] = self.batches
            self.next_id += 1

    def finish(self, group_id: int) -> None:
        self.tokens[group_id].append(self.window.proved)
        self.window.complete(group(group_id, *self.tokens[group_id]))
        self.place[group_id] = "ready"

    @precondition(lambda self: self.at("in flight"))
    @rule(data=st.data(), how=st.sampled_from(["one", "youngest", "all but the oldest", "all"]))
    def complete(self, data: st.DataObject, how: str) -> None:
        flying = self.at("in flight")
        one = [data.draw(st.sampled_from(flying))] if how == "one" else []
        for group_id in {"one": one, "youngest": flying[-1:], "all but the oldest": flying[1:], "all": flying}[how]:
            self.finish(group_id)

    @precondition(lambda self: self.at("in flight"))
    @rule(data=st.data(), reason=st.sampled_from(["filtered", "filtered", "failed", "cancelled"]))
    def lose(self, data: st.DataObject, reason: str) -> None:
        self.leave(data.draw(st.sampled_from(self.at("in flight"))), reason)

    @rule(slow=st.integers(0, 4), poor=st.integers(0, 3), rounds=st.integers(1, 8))
    def flow(self, slow: int, poor: int, rounds: int) -> None:
        """Everything as fast as it may, except some slow groups; some are filtered: what wears a window out."""
        for _ in range(rounds):
            if self.window.may_admit():
                self.admit(self.window.free)
            for group_id in self.at("in flight"):
                if group_id % 5 >= slow:
                    if group_id % 4 < poor:
                        self.leave(group_id, "filtered")
                    else:
                        self.finish(group_id)
            self.sweep()
            self.take()
            self.window.release(self.window.trained_version)
            self.something_can_always_move_once_groups_end()

    @rule()
    def sweep(self) -> None:
        """What the controller does before it looks for a batch."""
        for stale in self.window.stale():
            assert self.given["on_stale"] != "wait", "waiting lets nobody become too old"
            self.leave(stale.id, "stale")
        for group_id in self.window.surplus():
            assert self.spares, "without oversampling nobody is one too many"
            self.leave(group_id, "surplus")
        if self.given["on_stale"] != "wait":
            for group_id in [i for i in self.at("in flight") if self.window.late(min(self.tokens[i]))]:
                self.leave(group_id, "stale")

    @rule()
    def take(self) -> None:
        self.sweep()
        version = self.window.first_version + self.batches // self.given["publish_every"]
        assert self.window.trained_version == version
        unconsumed = self.at("in flight", "ready")
        # Of the groups of an oversampled run some are left over at its end: nobody asks for another batch then.
        batch = None if self.over() else self.window.take()
        if batch is None:
            return
        ids = [member.id for member in batch]
        assert len(ids) == self.given["groups"] and set(ids) <= set(self.at("ready")) and ids == sorted(ids)
        assert not self.synchronous or ids == unconsumed[: len(ids)]
        for member in batch:
            trace = member.rollouts[0].traces[0]
            assert trace.versions.tolist() == self.tokens[member.id], "records stay as they were"
            lags = version - trace.versions[trace.trained]
            assert len(lags) and lags.min() >= 0 and lags.max() <= self.bound
            assert trace.trained.all() or self.given["on_stale"] == "salvage"
            waited = self.batches - self.batches_before[member.id]
            if self.given["depth"] == "unbounded":
                # A group may end just before it is too old, and what is new in it lives as long again.
                lives = 2 if self.given["on_stale"] == "salvage" else 1
                assert waited < lives * (self.bound + 1) * self.given["publish_every"], "starved"
            else:
                assert waited <= (2 * self.capacity - 2) // self.given["groups"], "starved"
            self.place[member.id] = f"trained {version}"
            self.ledgers.group_ended(member.id, "trained")
        self.batches += 1
        if self.batches % self.given["publish_every"] == 0:
            self.published = self.window.trained_version

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        version = data.draw(st.integers(self.window.proved, self.window.trained_version))
        self.window.release(version)

    @rule()
    def crash_and_reload(self) -> None:
        """Nothing survives but the record: ledgers, published versions, the next id."""
        for group_id in self.at("in flight", "ready"):
            self.ledgers.group_ended(group_id, "dropped", "interrupted")
        if self.versions_left is not None:
            self.versions_left -= self.batches // self.given["publish_every"]
            self.versions_left = max(1, self.versions_left)
        counts = msgspec.to_builtins(self.ledgers.groups.counts())
        self.ledgers = Ledgers(self.ledgers.groups.counts(), self.ledgers.rollouts.counts())
        assert msgspec.to_builtins(self.ledgers.groups.counts()) == counts
        self.open_window()

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if not hasattr(self, "window"):
            return
        self.ledgers.check()
        counts = self.ledgers.groups.counts()
        assert counts.admitted == self.next_id
        held = [f"trained {v}" for v in range(self.window.proved, self.window.trained_version + 1)]
        assert self.window.in_flight == len(self.at("in flight"))
        assert self.window.ready == len(self.at("ready"))
        assert counts.in_flight == len(self.at("in flight", "ready"))
        assert self.window.occupied == len(self.at("in flight", "ready", *held)) <= self.capacity + self.spares
        assert "\n" not in self.window.explain()

    @invariant()
    def something_can_always_move_once_groups_end(self) -> None:
        if not hasattr(self, "window"):
            return
        later = copy.deepcopy(self.window)
        for group_id in self.at("in flight"):
            later.complete(group(group_id, *self.tokens[group_id]))
        for stale in later.stale():
            later.drop(stale.id)
        for group_id in later.surplus():
            later.drop(group_id)
        later.release(later.trained_version)
        assert self.over() or later.may_admit() or later.take() is not None, later.explain()


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBuffer = BufferMachine.TestCase
