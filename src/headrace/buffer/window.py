"""The window of groups under way: who may start, which groups are the next batch. No I/O, no clock, no waiting.

Groups under way never exceed the slots (and the spare ones of oversampling), and no batch leaves with a token over the
lag bound. `places` knows where every group is, `admission` has the arithmetic and its proofs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from headrace.buffer import admission
from headrace.buffer.filter_rate import FilterRate
from headrace.buffer.places import GroupPlaces
from headrace.buffer.salvage import masked
from headrace.errors import HeadraceError
from headrace.types import POLICY, Group, Int32Array, without_republished

OnStale = Literal["wait", "drop", "salvage"]
RATE_MEMORY = 4
"""The rate of filtered groups is measured over so many times the slots."""


class Window:
    """The state between admission and training. Group ids must increase; every other order is free."""

    def __init__(
        self,
        groups: int,
        depth: admission.Depth,
        publish_every: int = 1,
        max_lag: int | None = None,
        first_version: int = 0,
        versions: int | None = None,
        *,
        on_stale: OnStale = "wait",
        oversample: float = 1.0,
        republished: Sequence[int] = (),
        policy: str = POLICY,
    ) -> None:
        """With `versions`, nothing is admitted beyond what that many versions need.

        `republished` are ids that stand for weights with an older id (see `types.without_republished`), so far. All
        groups and versions here are those of one `policy`.
        """
        self.policy = policy
        self.groups = groups
        self.publish_every = publish_every
        self.max_lag = max_lag
        self.first_version = first_version
        self.depth = admission.effective_depth(depth, max_lag)
        self.size = admission.version_size(groups, publish_every)
        self.capacity = admission.capacity(depth, groups, publish_every, max_lag)
        self.lag_bound = admission.lag_bound(depth, groups, publish_every, max_lag)
        self.on_stale = on_stale
        self.spares = admission.spare_slots(oversample, self.capacity)
        self._anchored = depth != "unbounded"
        self._filter_rate = FilterRate(RATE_MEMORY * self.capacity)
        self.batches = 0
        """Batches taken."""
        self.proved = first_version
        """The version that all engines in use are known to hold."""
        self.republished = list(republished)
        self._shift = 0
        """Ids that were given to weights again since the first version."""
        self._wanted = None if versions is None else versions * self.size
        self._places = GroupPlaces()

    @property
    def in_flight(self) -> int:
        """Groups that are being generated or scored."""
        return self._places.in_flight

    @property
    def ready(self) -> int:
        """Complete groups that no batch has taken."""
        return len(self._places.ready)

    @property
    def occupied(self) -> int:
        """Slots in use."""
        return self._places.occupied

    @property
    def trained_version(self) -> int:
        """The version that the next batch trains."""
        return self.version_of(self.batches)

    def version_of(self, batch: int) -> int:
        """The version that this batch, counted from 0, trains."""
        return admission.version_of_batch(batch, self.first_version, self.publish_every) + self._shift

    def count(self, version: int) -> int:
        """How many versions were trained since the first one, at this version."""
        return self._own(version) - self._own(self.first_version)

    def republish(self, batches: int) -> int:
        """The next free id, for the version that so many batches made: its weights are published again.

        Nothing newer may have been published.
        """
        self._shift += 1
        self.republished.append(self.version_of(batches))
        return self.republished[-1]

    def restore(self, groups: Iterable[tuple[int, int]], trained: Iterable[int]) -> list[int]:
        """Take up (id, version at its admission) of groups that a previous process admitted, oldest first.

        `trained` are younger ones than the oldest of them that it has trained. Returns the ids that have no place,
        which happens only where the configuration gives fewer slots than it did.
        """
        refused = []
        for group_id, version in groups:
            if self.occupied >= self.capacity + self.spares:
                refused.append(group_id)
            else:
                self._places.enter(group_id, version, "restored")
        self._places.overtook(list(trained))
        return refused

    @property
    def free(self) -> int:
        """Slots that may be charged now.

        At most W - 1 groups overtake the oldest unconsumed one: a batch that leaves it behind finds more than `groups`
        unconsumed, so the last admission before it was not one into a full window, and at most W groups stood in it.
        """
        unconsumed = len(self._places.unconsumed)
        return admission.admissible(
            self.occupied,
            unconsumed + len(self._places.overtakers) if self._anchored else 0,
            unconsumed,
            self.capacity,
            self.groups,
            in_flight=self.in_flight,
            filtered=self.filtered_rate,
            spares=self.spares,
            needed=self._needed(),
        )

    @property
    def filtered_rate(self) -> float:
        """The share of the latest groups that was filtered."""
        return self._filter_rate.value

    def may_admit(self) -> bool:
        """Whether one more group may start."""
        return self.free > 0

    def admit(self, group_id: int, version: int) -> None:
        """Charge a slot for a group whose tokens will be of `version`, proved on its engine, or newer."""
        if not self.may_admit():
            raise HeadraceError(f"group {group_id} was admitted without a free slot: {self.explain()}")
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"group {group_id} was admitted at version {version}, but the engines have proved {self.proved} "
                f"and {self.trained_version} is in training"
            )
        self._places.enter(group_id, self.proved, "admitted")

    def complete(self, group: Group) -> None:
        """All rollouts of this group have ended and are scored."""
        if group.policy != self.policy:
            raise HeadraceError(f"group {group.id} trains {group.policy!r}, and this is the window of {self.policy!r}")
        self._places.complete(group)

    def drop(self, group_id: int) -> None:
        """This group will not be trained, by our decision: its slot is free."""
        self._places.leave(group_id, "dropped")

    def fail(self, group_id: int) -> None:
        """This group cannot be trained: its slot is free."""
        self._places.leave(group_id, "failed")

    def filter(self, group_id: int) -> None:
        """This group is of no use for training, and another one may take its place."""
        self._places.leave(group_id, "filtered")
        self._filter_rate.filtered(group_id)

    def late(self, version: int) -> bool:
        """Whether a group with a trained token of this version can no longer make `max_lag`."""
        return admission.late(self._own(version), self._own(self.trained_version), self.max_lag)

    def stale(self) -> list[Group]:
        """Ready groups that hold a token over `max_lag`; drop them before the next `take`.

        Under `on_stale = "salvage"` such tokens are masked, and only groups without any other are given here. Waiting
        prevents all of it for every group that this window admitted with tokens no older than its admission.
        """
        found = []
        for group in self.ready_groups():
            versions = _token_versions(group)
            if not len(versions) or not self.late(int(versions.min())):
                continue
            if self.on_stale == "salvage" and not self.late(int(versions.max())):
                assert self.max_lag is not None
                oldest = admission.oldest_on_time(self.trained_version, self.max_lag, self.republished)
                self._places.ready[group.id] = masked(group, oldest)
            else:
                found.append(group)
        return found

    def surplus(self) -> list[int]:
        """Groups without a seat that can get none any more, because nobody older can leave: drop or cancel them."""
        found: list[int] = []
        if self.spares:
            for group_id, has_seat in self._seats():
                if not has_seat:
                    found.append(group_id)
                elif group_id not in self._places.ready:
                    break
        return found

    def batch_ready(self) -> bool:
        """Whether `take` would give a batch now."""
        return self._next_batch() is not None

    def ready_groups(self) -> list[Group]:
        """Complete groups that no batch has taken, oldest first."""
        return [group for _, group in sorted(self._places.ready.items())]

    def take(self) -> list[Group] | None:
        """The next batch, oldest ready groups first, or None if it has to wait. Checks the lag of every token."""
        ids = self._next_batch()
        if ids is None:
            return None
        version = self.trained_version
        for group_id in ids:
            versions = _token_versions(self._places.ready[group_id])
            admission.check_lag(version, versions, self.lag_bound, self.republished)
        self._filter_rate.consumed(ids)
        self.batches += 1
        return self._places.consume(ids, version)

    def release(self, version: int) -> None:
        """The engines have proved `version`: free the slots of all groups that it was trained on."""
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"version {version} was proved after {self.proved}, while {self.trained_version} is in training"
            )
        self.proved = version
        self._places.free(lambda trained: self._own(trained) < self._own(version))

    def _next_batch(self) -> list[int] | None:
        ids = self._eligible()[: self.groups]
        return None if self._hindrance(ids) else ids

    def _hindrance(self, ids: list[int]) -> str:
        """Why the oldest groups that may be trained are not the next batch; empty if they are."""
        if len(ids) < self.groups:
            return "they are too few"
        # Synchronous runs are reproducible: which groups share a batch must not depend on who finished first.
        if self.depth == 0 and ids != list(self._places.unconsumed)[: self.groups]:
            return "depth 0 trains in order"
        if self._would_be_late(ids):
            return f"it would exceed max_lag = {self.max_lag} later"
        return "it is overtaken too far already" if self._would_overtake_too_far(ids) else ""

    def _eligible(self) -> list[int]:
        """Ready groups that may be trained, oldest first: none that is younger than one without a seat."""
        end = next((group_id for group_id, has_seat in self._seats() if not has_seat), None)
        return [group_id for group_id in sorted(self._places.ready) if end is None or group_id < end]

    def _seats(self) -> Iterator[tuple[int, bool]]:
        """Unconsumed groups, oldest first, and whether they have a seat once those before them without one are gone."""
        if not self.spares:
            yield from ((group_id, True) for group_id in self._places.unconsumed)
            return
        overtakers = self._places.overtakers
        older = self.batches * self.groups - len(overtakers)
        for group_id, version in self._places.unconsumed.items():
            before = older + sum(overtaker < group_id for overtaker in overtakers)
            has_seat = admission.seated(before, self.count(version), self.capacity, self.size)
            older += has_seat
            yield group_id, has_seat

    def _would_overtake_too_far(self, ids: list[int]) -> bool:
        """With spares more than W groups may stand from the oldest on; only the first W of them may leave it behind."""
        unconsumed, overtakers = self._places.unconsumed, self._places.overtakers
        if not self.spares or not self._anchored or next(iter(unconsumed)) == ids[0]:
            return False
        return sum(other < ids[-1] for other in (*unconsumed, *overtakers)) > self.capacity - 1

    def _would_be_late(self, ids: list[int]) -> bool:
        if self.max_lag is None or self.on_stale != "wait":
            return False
        taken = set(ids)
        left = [
            self.count(self._places.unconsumed[group_id]) if has_seat else None
            for group_id, has_seat in self._seats()
            if group_id not in taken
        ]
        return not admission.on_time((self.batches + 1) * self.groups, left, self.size, self.max_lag)

    def _own(self, version: int) -> int:
        return int(without_republished(version, self.republished))

    def _needed(self) -> int | None:
        """How many groups more than the unconsumed ones are of any use."""
        if self._wanted is None:
            return None
        return self._wanted - self.batches * self.groups - len(self._places.unconsumed)

    def explain(self) -> str:
        """One line: what the next admission and the next batch wait for."""
        return f"{self.explain_admission()}; {self.explain_batch()}"

    def explain_admission(self) -> str:
        """What the next admission waits for."""
        places = self._places
        if free := self.free:
            return f"{free} of {self.capacity} slots may be charged"
        needed = self._needed()
        if needed is not None and needed <= 0:
            return "nothing is admitted: the last version has all its groups"
        if self.occupied >= self.capacity:
            return (
                f"nothing is admitted: all {self.capacity} slots are taken ({self.in_flight} groups in flight, "
                f"{self.ready} ready, {places.in_training} until the engines prove version {self.proved + 1})"
            )
        anchor = places.describe(next(iter(places.unconsumed)))
        return (
            f"nothing is admitted: the window of {self.capacity} groups is full behind {anchor}, "
            f"which {len(places.overtakers)} younger ones have overtaken"
        )

    def explain_batch(self) -> str:
        """What the next batch waits for."""
        if self._next_batch() is not None:
            return f"a batch for version {self.trained_version} is ready"
        oldest = self._places.oldest_unfinished()
        ids = self._eligible()[: self.groups]
        if len(ids) < self.groups:
            return f"no batch: {self.ready} of {self.groups} groups are ready, the oldest unfinished one is {oldest}"
        return f"no batch: it has to wait for {oldest} ({self._hindrance(ids)})"


def _token_versions(group: Group) -> Int32Array:
    traces = [trace.versions[trace.trained] for rollout in group.usable for trace in rollout.traces]
    return np.concatenate(traces) if traces else np.empty(0, np.int32)
