"""The window of groups under way: who may start, which groups are the next batch. No I/O, no clock, no waiting.

Every admitted group is in exactly one place: in flight, ready, in training (consumed, its slot not yet free) or gone.
Slots in use never exceed the capacity, and no batch leaves with a token over the lag bound.
"""

from __future__ import annotations

import numpy as np

from headrace.buffer import admission
from headrace.errors import HeadraceError
from headrace.types import Group, Int32Array


class Window:
    """The state between admission and training. Group ids must increase; every other order is free."""

    def __init__(
        self,
        groups: int,
        depth: int,
        publish_every: int = 1,
        max_lag: int | None = None,
        first_version: int = 0,
        versions: int | None = None,
    ) -> None:
        """With `versions`, nothing is admitted beyond what that many versions need."""
        self.groups = groups
        self.publish_every = publish_every
        self.max_lag = max_lag
        self.first_version = first_version
        self.depth = admission.effective_depth(depth, max_lag)
        self.size = admission.version_size(groups, publish_every)
        self.capacity = admission.capacity(depth, groups, publish_every, max_lag)
        self.lag_bound = admission.lag_bound(depth, groups, publish_every, max_lag)
        self.batches = 0
        """Batches taken."""
        self.proved = first_version
        """The version that all engines in use are known to hold."""
        self._wanted = None if versions is None else versions * self.size
        self._last_id: int | None = None
        self._unconsumed: dict[int, int] = {}
        """Group id -> version proved at its admission, oldest first. `Group.version` may be newer on one engine."""
        self._ready: dict[int, Group] = {}
        self._training: dict[int, int] = {}
        """Version being trained -> groups consumed for it whose slots are not free."""
        self._overtakers: set[int] = set()
        """Consumed groups that are younger than the oldest unconsumed one."""

    @property
    def in_flight(self) -> int:
        """Groups that are being generated or scored."""
        return len(self._unconsumed) - len(self._ready)

    @property
    def ready(self) -> int:
        """Complete groups that no batch has taken."""
        return len(self._ready)

    @property
    def occupied(self) -> int:
        """Slots in use."""
        return len(self._unconsumed) + sum(self._training.values())

    @property
    def trained_version(self) -> int:
        """The version that the next batch trains."""
        return admission.version_of_batch(self.batches, self.first_version, self.publish_every)

    @property
    def free(self) -> int:
        """Slots that may be charged now.

        At most W - 1 groups overtake the oldest unconsumed one: a batch that leaves it behind finds more than `groups`
        unconsumed, so the last admission before it was not one into a full window, and at most W groups stood in it.
        """
        span = len(self._unconsumed) + len(self._overtakers)
        free = admission.admissible(self.occupied, span, len(self._unconsumed), self.capacity, self.groups)
        if self._wanted is None:
            return free
        return min(free, self._wanted - self.batches * self.groups - len(self._unconsumed))

    def may_admit(self) -> bool:
        """Whether one more group may start."""
        return self.free > 0

    def admit(self, group_id: int, version: int) -> None:
        """Charge a slot for a group whose tokens will be of `version`, proved on its engine, or newer."""
        if not self.may_admit():
            raise HeadraceError(f"group {group_id} was admitted without a free slot: {self.explain()}")
        if self._last_id is not None and group_id <= self._last_id:
            raise HeadraceError(f"group {group_id} was admitted after group {self._last_id}: ids must increase")
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"group {group_id} was admitted at version {version}, but the engines have proved {self.proved} "
                f"and {self.trained_version} is in training"
            )
        self._last_id = group_id
        self._unconsumed[group_id] = self.proved

    def complete(self, group: Group) -> None:
        """All rollouts of this group have ended and are scored."""
        if group.id not in self._unconsumed or group.id in self._ready:
            raise HeadraceError(f"group {group.id} was completed but is not in flight")
        self._ready[group.id] = group

    def drop(self, group_id: int) -> None:
        """This group will not be trained, by our decision: its slot is free."""
        self._leave(group_id, "dropped")

    def fail(self, group_id: int) -> None:
        """This group cannot be trained: its slot is free."""
        self._leave(group_id, "failed")

    def stale(self) -> list[Group]:
        """Ready groups that hold a token over `max_lag`; drop them before the next `take`.

        Pacing prevents it for every group that this window admitted with tokens no older than its admission.
        """
        if self.max_lag is None:
            return []
        oldest = self.trained_version - self.max_lag
        return [group for _, group in sorted(self._ready.items()) if (_token_versions(group) < oldest).any()]

    def batch_ready(self) -> bool:
        """Whether `take` would give a batch now."""
        return self._next_batch() is not None

    def ready_groups(self) -> list[Group]:
        """Complete groups that no batch has taken, oldest first."""
        return [self._ready[group_id] for group_id in sorted(self._ready)]

    def take(self) -> list[Group] | None:
        """The next batch, oldest ready groups first, or None if it has to wait. Checks the lag of every token."""
        ids = self._next_batch()
        if ids is None:
            return None
        for group_id in ids:
            admission.check_lag(self.trained_version, _token_versions(self._ready[group_id]), self.lag_bound)
        version = self.trained_version
        self.batches += 1
        self._training[version] = self._training.get(version, 0) + len(ids)
        self._overtakers.update(ids)
        for group_id in ids:
            del self._unconsumed[group_id]
        self._move_anchor()
        return [self._ready.pop(group_id) for group_id in ids]

    def release(self, version: int) -> None:
        """The engines have proved `version`: free the slots of all groups that it was trained on."""
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"version {version} was proved after {self.proved}, while {self.trained_version} is in training"
            )
        self.proved = version
        self._training = {trained: count for trained, count in self._training.items() if trained >= version}

    def explain(self) -> str:
        """One line: what the next admission and the next batch wait for."""
        return f"{self.explain_admission()}; {self.explain_batch()}"

    def _next_batch(self) -> list[int] | None:
        if len(self._ready) < self.groups:
            return None
        ids = sorted(self._ready)[: self.groups]
        # Synchronous runs are reproducible: which groups share a batch must not depend on who finished first.
        if self.depth == 0 and ids != list(self._unconsumed)[: self.groups]:
            return None
        return None if self._would_be_late(ids) else ids

    def _would_be_late(self, ids: list[int]) -> bool:
        if self.max_lag is None:
            return False
        taken = set(ids)
        left = [version - self.first_version for id_, version in self._unconsumed.items() if id_ not in taken]
        return not admission.on_time((self.batches + 1) * self.groups, left, self.size, self.max_lag)

    def _leave(self, group_id: int, how: str) -> None:
        if self._unconsumed.pop(group_id, None) is None:
            raise HeadraceError(f"group {group_id} was {how} but is neither in flight nor ready")
        self._ready.pop(group_id, None)
        self._move_anchor()

    def _move_anchor(self) -> None:
        oldest = next(iter(self._unconsumed), None)
        self._overtakers = {i for i in self._overtakers if oldest is not None and i > oldest}

    def explain_admission(self) -> str:
        """What the next admission waits for."""
        if free := self.free:
            return f"{free} of {self.capacity} slots may be charged"
        if self._wanted is not None and self.batches * self.groups + len(self._unconsumed) >= self._wanted:
            return "nothing is admitted: the last version has all its groups"
        if self.occupied >= self.capacity:
            held = self.occupied - len(self._unconsumed)
            return (
                f"nothing is admitted: all {self.capacity} slots are taken ({self.in_flight} groups in flight, "
                f"{self.ready} ready, {held} until the engines prove version {self.proved + 1})"
            )
        anchor = self._describe(next(iter(self._unconsumed)))
        return (
            f"nothing is admitted: the window of {self.capacity} groups is full behind {anchor}, "
            f"which {len(self._overtakers)} younger ones have overtaken"
        )

    def explain_batch(self) -> str:
        """What the next batch waits for."""
        if self._next_batch() is not None:
            return f"a batch for version {self.trained_version} is ready"
        if len(self._ready) < self.groups:
            return (
                f"no batch: {self.ready} of {self.groups} groups are ready, "
                f"the oldest unfinished one is {self._oldest_unfinished()}"
            )
        order = "depth 0 trains in order" if self.depth == 0 else f"it would exceed max_lag = {self.max_lag} later"
        return f"no batch: it has to wait for {self._oldest_unfinished()} ({order})"

    def _describe(self, group_id: int) -> str:
        place = "ready, of" if group_id in self._ready else "in flight since"
        return f"group {group_id}, {place} version {self._unconsumed[group_id]}"

    def _oldest_unfinished(self) -> str:
        oldest = next((id_ for id_ in self._unconsumed if id_ not in self._ready), None)
        return "none" if oldest is None else self._describe(oldest)


def _token_versions(group: Group) -> Int32Array:
    traces = [trace.versions[trace.trained] for rollout in group.usable for trace in rollout.traces]
    return np.concatenate(traces) if traces else np.empty(0, np.int32)
