"""A window and its journal through crashes at any point: what was committed goes on, nothing twice, nothing lost.

The run without time of `test_window_machine`, on a real journal. A crash takes what was not committed yet; the next
life reopens the books as a run does: it trains again up to the reach and takes up what was in flight, to the token.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from committed_ledgers import committed
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.buffer import journal
from headrace.buffer.journal import Journal, Recovered
from headrace.buffer.window import Window
from headrace.observe.records import StepRecord
from headrace.types import Group, Prompt, Rollout, Trace, Version


@pytest.fixture(autouse=True, scope="module")
def quick_commits() -> Iterator[None]:
    """A journal that is closed waits for no more events: the time of a commit is the time of a crash here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "COMMIT_SECONDS", 0.002)
        yield


def trace(versions: list[int]) -> Trace:
    n = len(versions)
    return Trace(
        token_ids=np.arange(n, dtype=np.int32),
        trained=np.ones(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        versions=np.array(versions, np.int32),
    )


class State:
    """What the run knows; a crash takes it back to its last commit."""

    def __init__(self) -> None:
        self.next_id = self.steps = self.checkpoint = 0
        self.versions: list[tuple[int, int]] = []
        """(id, step) as published."""
        self.tokens: dict[int, list[int]] = {}
        self.saved: dict[int, int] = {}
        """Group -> how many of its tokens are in the journal while it is in flight."""
        self.place: dict[int, str] = {}
        """in flight, ready, gone, or the step that trained it."""

    def at(self, *places: str) -> list[int]:
        return [group_id for group_id, place in self.place.items() if place in places]


class RecoveryMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.integers(1, 3),
        depth=st.integers(0, 3) | st.just("unbounded"),
        publish_every=st.integers(1, 2),
        max_lag=st.none() | st.integers(0, 4),
        on_stale=st.sampled_from(["wait", "drop", "salvage"]),
        oversample=st.sampled_from([1.0, 1.0, 2.0]),
    )
    def start(self, **given: Any) -> None:
        if given["depth"] == "unbounded" or given["on_stale"] != "wait":
            given["max_lag"] = 1 if given["max_lag"] is None else given["max_lag"]
        self.given = given
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "journal.db"
        self.state = State()
        self.pending: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.journal = Journal(self.path)
        self.open_window(self.journal.recover(step=0, publish_every=given["publish_every"]))
        self.commit()

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.directory.cleanup()

    def open_window(self, found: Recovered) -> None:
        """As a run does: the next free id for the weights that the reach gives."""
        first = found.last_version + 1
        self.window = Window(**self.given, first_version=first, republished=found.republished)
        self.publish(first, self.state.steps)

    def publish(self, version: int, step: int) -> None:
        self.state.versions.append((version, step))
        self.write("version", Version(id=version, parent=version - 1, step=step, digest=0))

    def write(self, event: str, *facts: Any, **more: Any) -> None:
        """A call of the journal's that the next commit makes."""
        self.pending.append((event, facts, more))

    def group(self, group_id: int) -> Group:
        rollout = Rollout(
            id=f"{group_id}/0", index=0, traces=[trace(self.state.tokens[group_id])], ending="finished", reward=1.0
        )
        return Group(id=group_id, prompt=Prompt(id=f"p{group_id}", text="x"), version=0, rollouts=[rollout])

    @rule()
    def commit(self) -> None:
        for event, facts, more in self.pending:
            getattr(self.journal, event)(*facts, **more)
        self.journal.flush()
        self.pending = []
        self.committed = copy.deepcopy(self.state)

    @precondition(lambda self: self.window.may_admit())
    @rule(count=st.integers(1, 8))
    def admit(self, count: int) -> None:
        for _ in range(min(count, self.window.free)):
            group_id, version = self.state.next_id, self.window.proved
            self.state.next_id += 1
            self.window.admit(group_id, version)
            self.state.place[group_id], self.state.tokens[group_id] = "in flight", [version]
            self.state.saved[group_id] = 0
            group = Group(id=group_id, prompt=Prompt(id=f"p{group_id}", text="x"), version=version)
            self.write("admitted", group, [f"{group_id}/0"])

    @precondition(lambda self: self.state.at("in flight"))
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        """New tokens of a rollout that goes on are written down."""
        group_id = data.draw(st.sampled_from(self.state.at("in flight")))
        tokens = self.state.tokens[group_id]
        tokens.append(self.window.proved)
        part = trace(tokens[self.state.saved[group_id] :])
        self.state.saved[group_id] = len(tokens)
        rollout = Rollout(id=f"{group_id}/0", index=0, traces=[part], ending="aborted", reason="not ended yet")
        self.write("partial", rollout)

    @precondition(lambda self: self.state.at("in flight"))
    @rule(data=st.data(), how=st.sampled_from(["one", "all but the oldest", "all"]))
    def complete(self, data: st.DataObject, how: str) -> None:
        flying = self.state.at("in flight")
        one = [data.draw(st.sampled_from(flying))] if how == "one" else []
        for group_id in {"one": one, "all but the oldest": flying[1:], "all": flying}[how]:
            self.finish(group_id)

    def finish(self, group_id: int) -> None:
        self.state.tokens[group_id].append(self.window.proved)
        self.state.place[group_id] = "ready"
        group = self.group(group_id)
        self.window.complete(group)
        self.write("rollout_ended", group.rollouts[0])

    @precondition(lambda self: self.state.at("in flight"))
    @rule(data=st.data(), reason=st.sampled_from(["filtered", "failed", "cancelled"]))
    def lose(self, data: st.DataObject, reason: str) -> None:
        self.leave(data.draw(st.sampled_from(self.state.at("in flight"))), reason)

    def leave(self, group_id: int, reason: str) -> None:
        {"filtered": self.window.filter, "failed": self.window.fail}.get(reason, self.window.drop)(group_id)
        self.state.place[group_id] = "gone"
        self.write("group_ended", group_id, "failed" if reason == "failed" else "dropped", reason)

    def sweep(self) -> None:
        for stale in self.window.stale():
            assert self.given["on_stale"] != "wait", "waiting lets nobody become too old, crash or not"
            self.leave(stale.id, "stale")
        for group_id in self.window.surplus():
            self.leave(group_id, "surplus")
        if self.given["on_stale"] != "wait":
            for group_id in [i for i in self.state.at("in flight") if self.window.late(min(self.state.tokens[i]))]:
                self.leave(group_id, "stale")

    @rule(times=st.integers(1, 3))
    def train(self, times: int) -> None:
        for _ in range(times):
            self.sweep()
            version = self.window.trained_version
            batch = self.window.take()
            if batch is None:
                return
            self.state.steps += 1
            step = self.state.steps
            for member in batch:
                assert self.state.place[member.id] == "ready", "trained twice, or before it had ended"
                kept = member.rollouts[0].traces[0]
                assert kept.versions.tolist() == self.state.tokens[member.id], "records stay as they were sampled"
                self.check_lag(version, kept)
                self.state.place[member.id] = str(step)
                self.write("group_ended", member.id, "trained", step=step)
            done = StepRecord(
                step=step, version=version, objective="policy", groups=len(batch), rollouts=len(batch),
                tokens=1, trained_tokens=1,
            )  # fmt: skip
            self.write("step", done, {})
            if step % self.given["publish_every"] == 0:
                self.publish(version + 1, step)

    def check_lag(self, version: int, kept: Trace) -> None:
        """In optimizer steps behind the weights, counted from what was published: no id has a part in it."""
        steps = dict(self.state.versions)
        behind = [
            (steps[version] - steps[sampled]) // self.given["publish_every"]
            for sampled in kept.versions[kept.trained].tolist()
        ]
        assert behind and min(behind) >= 0 and max(behind) <= self.window.lag_bound

    @rule(slow=st.integers(0, 4), rounds=st.integers(1, 6), crash=st.booleans())
    def flow(self, slow: int, rounds: int, crash: bool) -> None:
        """Everything as fast as it may, except some slow groups; then perhaps a crash right there."""
        for _ in range(rounds):
            if self.window.may_admit():
                self.admit(self.window.free)
            for group_id in self.state.at("in flight"):
                if group_id % 5 >= slow:
                    self.finish(group_id)
            self.train(1)
            self.window.release(self.state.versions[-1][0])
            self.something_can_always_move_once_groups_end()
        if crash:
            self.commit()
            self.crash()

    @rule(data=st.data())
    def prove(self, data: st.DataObject) -> None:
        published = [version for version, _ in self.state.versions if version >= self.window.proved]
        self.window.release(data.draw(st.sampled_from(published)))

    @rule()
    def save_checkpoint(self) -> None:
        self.commit()  # a checkpoint is announced after the steps that it holds
        self.state.checkpoint = self.committed.checkpoint = self.state.versions[-1][1]

    @rule()
    def crash(self) -> None:
        self.pending = []
        self.journal.close()
        self.journal = Journal(self.path)
        state = self.state = copy.deepcopy(self.committed)
        every = self.given["publish_every"]
        found = self.journal.recover(step=state.checkpoint, publish_every=every)
        assert found.resume_step == max(state.checkpoint, state.steps - state.steps % every)
        for group_id, place in state.place.items():
            if place.isdecimal() and int(place) > found.resume_step:
                state.place[group_id] = "ready"
        state.steps = found.resume_step
        assert [left.group.id for left in found.unfinished] == sorted(state.at("in flight", "ready"))
        assert found.next_group == max(state.place, default=-1) + 1
        assert found.last_version == state.versions[-1][0], "ids are never given twice"
        state.next_id = found.next_group
        self.open_window(found)
        oldest = min((left.group.id for left in found.unfinished), default=state.next_id)
        trained = [group_id for group_id, place in state.place.items() if place.isdecimal()]
        assert sorted(found.overtakers) == [i for i in sorted(trained) if i > oldest]
        refused = self.window.restore(
            [(left.group.id, left.group.version) for left in found.unfinished], found.overtakers
        )
        assert refused == {}, "the same configuration has a place for all"
        for left in found.unfinished:
            self.take_up(left.group.id, left.complete, left.group.rollouts, left.partial)
        self.commit()

    def take_up(self, group_id: int, complete: bool, rollouts: list[Rollout], partial: dict[str, list[Trace]]) -> None:
        assert complete == (self.state.place[group_id] == "ready")
        if complete:
            assert rollouts[0].traces[0].versions.tolist() == self.state.tokens[group_id]
            self.window.complete(self.group(group_id))
            return
        saved = [version for trace in partial.get(f"{group_id}/0", []) for version in trace.versions.tolist()]
        assert saved == self.state.tokens[group_id][: self.state.saved[group_id]], "to the last token that was saved"
        # Whoever had saved nothing begins anew, under the weights of this life.
        self.state.tokens[group_id] = saved or [self.window.proved]

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "window"):
            return
        assert self.window.in_flight == len(self.state.at("in flight"))
        assert self.window.ready == len(self.state.at("ready"))
        assert self.window.occupied <= self.window.capacity + self.window.spares
        if not self.pending:
            counts = committed(self.journal)["groups"]
            trained = sum(place.isdecimal() for place in self.state.place.values())
            assert (counts["admitted"], counts["trained"]) == (self.state.next_id, trained)
            assert counts["in_flight"] == len(self.state.at("in flight", "ready"))
            assert counts["dropped"] + counts["failed"] == len(self.state.at("gone"))

    @invariant()
    def something_can_always_move_once_groups_end(self) -> None:
        if not hasattr(self, "window"):
            return
        later = copy.deepcopy(self.window)
        for group_id in self.state.at("in flight"):
            later.complete(self.group(group_id))
        for stale in later.stale():
            later.drop(stale.id)
        for group_id in later.surplus():
            later.drop(group_id)
        later.release(later.trained_version)
        assert later.may_admit() or later.take() is not None, later.explain()


RecoveryMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestRecovery = RecoveryMachine.TestCase
