"""The window: the groups that are admitted and not yet trained. It decides which groups may start and which train next.

The window keeps two invariants: the groups in it never exceed the slots (plus the spare slots of oversampling), and no
batch leaves with a token over the lag bound. It does no I/O, has no clock and never waits. Every admitted group is in
exactly one place: in flight, ready, in training (consumed, with its slot not yet free) or gone. `admission` has the
arithmetic, and `docs/staleness.md` the proofs.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from headrace.buffer import admission
from headrace.buffer.filters import masked
from headrace.errors import HeadraceError
from headrace.types import POLICY, Group, Int32Array, without_republished

OnStale = Literal["wait", "drop", "salvage"]
NO_SLOT, TOO_OLD = "no slot after a resume", "too old after a resume"
"""Why a group of a previous process does not go on, although its prompt still exists."""
RATE_MEMORY = 4
"""The rate of filtered groups is measured over the last `RATE_MEMORY` x capacity groups."""


class Window:
    """The state between admission and training. Groups must be admitted in the order of their ids, each once."""

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
        """With `versions`, the window admits no more groups than that many versions need.

        `republished` holds the ids, so far, of weights that had an older id before (see `types.without_republished`).
        All groups and versions of the window belong to one `policy`.
        """
        self.policy = policy
        self.groups = groups
        self.publish_every = publish_every
        self.max_lag = max_lag
        self.first_version = first_version
        self.depth = admission.effective_depth(depth, max_lag)
        self.size = groups * publish_every
        self.capacity = admission.capacity(depth, groups, publish_every, max_lag)
        self.lag_bound = admission.lag_bound(depth, groups, publish_every, max_lag)
        self.on_stale = on_stale
        self.spares = int((oversample - 1.0) * self.capacity)
        """The number of groups that may be under way beyond the slots."""
        self._anchored = depth != "unbounded"
        self.batches = 0
        """The number of batches taken."""
        self.proved = first_version
        """The version that all engines in use are known to hold."""
        self.republished = list(republished)
        self._shift = 0
        """The number of ids that went to republished weights since the first version."""
        self._wanted = None if versions is None else versions * self.size
        self._last_id = -1
        self._unconsumed: dict[int, int] = {}
        """The version proved at the admission of each unconsumed group, by group id, oldest first. `Group.version` may
        be newer, because its engine may have proved a newer version."""
        self._ready: dict[int, Group] = {}
        """The unconsumed groups that are complete."""
        self._sampled: dict[int, tuple[int, int] | None] = {}
        """The oldest and the newest version that sampled trained tokens of each ready group; None if no token is
        trained. `stale` asks for them at every event."""
        self._overtakers: set[int] = set()
        """The consumed groups that are younger than the oldest unconsumed group."""
        self._training: Counter[int] = Counter()
        """The number of groups that were consumed for each version and whose slots are not free, by version being
        trained."""
        self._outcomes: deque[bool] = deque(maxlen=RATE_MEMORY * self.capacity)
        """Whether each of the latest groups was filtered, in the order of their age, up to the youngest consumed group.
        So the rate of filtered groups does not depend on which group finished first."""
        self._filtered: list[int] = []
        """The filtered groups that are not in `_outcomes` yet."""

    @property
    def in_flight(self) -> int:
        """The number of groups that are being generated or scored."""
        return len(self._unconsumed) - len(self._ready)

    @property
    def ready(self) -> int:
        """The number of complete groups that no batch has taken."""
        return len(self._ready)

    @property
    def occupied(self) -> int:
        """The number of slots in use."""
        return len(self._unconsumed) + self._training.total()

    @property
    def trained_version(self) -> int:
        """The version that the next batch trains."""
        return self.version_of(self.batches)

    def version_of(self, batch: int) -> int:
        """Return the version that this batch, counted from 0, trains."""
        return self.first_version + batch // self.publish_every + self._shift

    def count(self, version: int) -> int:
        """Return the number of versions between the first version and this one, without republished ids."""
        return self._own(version) - self._own(self.first_version)

    def republish(self, batches: int) -> int:
        """Return the next free id, under which the newest version, made by `batches` batches, is published again."""
        self._shift += 1
        self.republished.append(self.version_of(batches))
        return self.republished[-1]

    def restore(self, groups: Iterable[tuple[int, int]], trained: Iterable[int]) -> dict[int, str]:
        """Give slots to groups that a previous process admitted, as (group id, version at admission), oldest first.

        `trained` holds the groups that the previous process has trained and that are younger than the oldest of
        `groups`. Return the groups that got no slot, by id, with the reasons. There are such groups only if the
        configuration now gives fewer slots or a smaller bound than before. Batches would wait for ever for a group that
        is over the bound even if it is trained as early as it can be.
        """
        for group_id, version in groups:
            self._enter(group_id, version, "restored")
        self._overtake(trained)
        refused = {}
        while (late := self._overdue()) is not None:
            self._leave(late, "refused")
            refused[late] = TOO_OLD
        for group_id in list(self._unconsumed)[self.capacity + self.spares :]:
            self._leave(group_id, "refused")
            refused[group_id] = NO_SLOT
        return refused

    def _overdue(self) -> int | None:
        """Return the oldest group that would be over the bound in strict age order too; None if there is none."""
        if self.on_stale == "wait":
            for place, (group_id, has_seat) in enumerate(self._seats()):
                if has_seat and place // self.size - self.count(self._unconsumed[group_id]) > self.lag_bound:
                    return group_id
        return None

    @property
    def free(self) -> int:
        """The number of groups that may be admitted now."""
        unconsumed = len(self._unconsumed)
        return admission.admissible(
            self.occupied,
            unconsumed + len(self._overtakers) if self._anchored else 0,
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
        """The share of filtered groups among the latest groups; 0 before the first batch."""
        return sum(self._outcomes) / len(self._outcomes) if self._outcomes else 0.0

    def may_admit(self) -> bool:
        """Return whether one more group may start."""
        return self.free > 0

    def admit(self, group_id: int, version: int) -> None:
        """Charge a slot for a group. Its tokens will be of `version`, which its engine has proved, or newer."""
        if not self.may_admit():
            raise HeadraceError(f"group {group_id} was admitted without a free slot: {self.explain()}")
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"group {group_id} was admitted at version {version}, but the engines have proved {self.proved} "
                f"and {self.trained_version} is in training"
            )
        self._enter(group_id, self.proved, "admitted")

    def complete(self, group: Group) -> None:
        """Mark a group as ready: all its rollouts have ended and are scored."""
        if group.policy != self.policy:
            raise HeadraceError(f"group {group.id} trains {group.policy!r}, and this is the window of {self.policy!r}")
        if group.id not in self._unconsumed or group.id in self._ready:
            raise HeadraceError(f"group {group.id} was completed but is not in flight")
        self._keep(group)

    def drop(self, group_id: int) -> None:
        """Remove a group that Headrace decided not to train, and free its slot."""
        self._leave(group_id, "dropped")

    def fail(self, group_id: int) -> None:
        """Remove a group that cannot be trained, and free its slot."""
        self._leave(group_id, "failed")

    def filter(self, group_id: int) -> None:
        """Remove a group that is of no use for training. Another group may take its slot."""
        self._leave(group_id, "filtered")
        self._filtered.append(group_id)

    def late(self, version: int) -> bool:
        """Return whether a trained token of this version would be over the lag bound in the next batch."""
        return self._own(self.trained_version) - self._own(version) > self.lag_bound

    def stale(self) -> list[Group]:
        """Return the ready groups that hold a token over the bound. The caller drops them before the next `take`.

        With `on_stale = "salvage"`, this method masks the tokens that are too old, and returns only the groups that
        have no other trained tokens. With `on_stale = "wait"`, a group that this window admitted never becomes stale,
        provided that its tokens are no older than its admission. A group that was restored under another configuration
        may become stale.
        """
        found = []
        for group_id in sorted(self._ready):
            sampled = self._sampled[group_id]
            if sampled is None or not self.late(sampled[0]):
                continue
            if self.on_stale == "salvage" and not self.late(sampled[1]):
                assert self.max_lag is not None
                oldest = admission.oldest_on_time(self.trained_version, self.max_lag, self.republished)
                self._keep(masked(self._ready[group_id], oldest))
                sampled = self._sampled[group_id]
                if sampled is not None and not self.late(sampled[0]):
                    continue
            found.append(self._ready[group_id])
        return found

    def _keep(self, group: Group) -> None:
        versions = _token_versions(group)
        self._ready[group.id] = group
        self._sampled[group.id] = (int(versions.min()), int(versions.max())) if len(versions) else None

    def surplus(self) -> list[int]:
        """Return the groups without a seat that can no longer get one. The caller drops or cancels these groups.

        Such a group gets no seat because all older groups with a seat are complete, so none of them can leave.
        """
        found: list[int] = []
        if self.spares:
            for group_id, has_seat in self._seats():
                if not has_seat:
                    found.append(group_id)
                elif group_id not in self._ready:
                    break
        return found

    def batch_ready(self) -> bool:
        """Return whether `take` would return a batch now."""
        return self._next_batch() is not None

    def ready_groups(self) -> list[Group]:
        """Return the complete groups that no batch has taken, oldest first."""
        return [group for _, group in sorted(self._ready.items())]

    def take(self) -> list[Group] | None:
        """Take the oldest ready groups as the next batch, and check the lag of each token. None if it has to wait."""
        ids = self._next_batch()
        if ids is None:
            return None
        version = self.trained_version
        for group_id in ids:
            admission.check_lag(version, _token_versions(self._ready[group_id]), self.lag_bound, self.republished)
        for group_id in ids:
            del self._unconsumed[group_id]
        self._overtake(ids)
        settled = [group_id for group_id in self._filtered if group_id < ids[-1]]
        self._filtered = [group_id for group_id in self._filtered if group_id > ids[-1]]
        self._outcomes.extend([True] * len(settled) + [False] * len(ids))
        self._training[version] += len(ids)
        self.batches += 1
        return [self._remove(group_id) for group_id in ids]

    def _remove(self, group_id: int) -> Group:
        del self._sampled[group_id]
        return self._ready.pop(group_id)

    def release(self, version: int) -> None:
        """Record that the engines have proved `version`, and free the slots of all groups that it was trained on."""
        if not self.proved <= version <= self.trained_version:
            raise HeadraceError(
                f"version {version} was proved after {self.proved}, while {self.trained_version} is in training"
            )
        self.proved = version
        for trained in [trained for trained in self._training if self._own(trained) < self._own(version)]:
            del self._training[trained]

    def _enter(self, group_id: int, version: int, how: str) -> None:
        if group_id <= self._last_id:
            raise HeadraceError(f"group {group_id} was {how} after group {self._last_id}: ids must increase")
        self._last_id = group_id
        self._unconsumed[group_id] = version

    def _leave(self, group_id: int, how: str) -> None:
        if self._unconsumed.pop(group_id, None) is None:
            raise HeadraceError(f"group {group_id} was {how} but is neither in flight nor ready")
        if group_id in self._ready:
            self._remove(group_id)
        self._overtake(())

    def _overtake(self, consumed: Iterable[int]) -> None:
        """Keep those of the consumed groups that are younger than the oldest unconsumed one: they overtook it."""
        oldest = next(iter(self._unconsumed), None)
        known = {*self._overtakers, *consumed}
        self._overtakers = {group_id for group_id in known if oldest is not None and group_id > oldest}

    def _next_batch(self) -> list[int] | None:
        ids = self._eligible()[: self.groups]
        return None if self._hindrance(ids) else ids

    def _hindrance(self, ids: list[int]) -> str:
        """Return why the oldest trainable groups may not be the next batch; empty if they may."""
        if len(ids) < self.groups:
            return "they are too few"
        # Synchronous runs are reproducible: which groups share a batch must not depend on which group finished first.
        if self.depth == 0 and ids != list(self._unconsumed)[: self.groups]:
            return "depth 0 trains in order"
        if self._would_be_late(ids):
            return f"it would exceed max_lag = {self.max_lag} later"
        return "it is overtaken too far already" if self._would_overtake_too_far(ids) else ""

    def _eligible(self) -> list[int]:
        """Return the ready groups that may be trained, oldest first, up to the first group without a seat."""
        end = next((group_id for group_id, has_seat in self._seats() if not has_seat), None)
        return [group_id for group_id in sorted(self._ready) if end is None or group_id < end]

    def _seats(self) -> Iterator[tuple[int, bool]]:
        """Yield the unconsumed groups, oldest first, and whether each has a seat. Groups without one do not count."""
        if not self.spares:
            yield from ((group_id, True) for group_id in self._unconsumed)
            return
        older = self.batches * self.groups - len(self._overtakers)
        for group_id, version in self._unconsumed.items():
            before = older + sum(overtaker < group_id for overtaker in self._overtakers)
            # Older groups only ever leave, so a group keeps its seat (`docs/staleness.md`, rule 5).
            has_seat = before < self.capacity + self.size * self.count(version)
            older += has_seat
            yield group_id, has_seat

    def _would_overtake_too_far(self, ids: list[int]) -> bool:
        """Return whether this batch would let a group overtake the oldest one from beyond the first W groups.

        With spares, more than W groups may stand in the window; only the first W may leave the oldest group behind.
        """
        if not self.spares or not self._anchored or next(iter(self._unconsumed)) == ids[0]:
            return False
        return sum(other < ids[-1] for other in (*self._unconsumed, *self._overtakers)) > self.capacity - 1

    def _would_be_late(self, ids: list[int]) -> bool:
        if self.max_lag is None or self.on_stale != "wait":
            return False
        taken = set(ids)
        left = [
            self.count(self._unconsumed[group_id]) if has_seat else None
            for group_id, has_seat in self._seats()
            if group_id not in taken
        ]
        return not admission.on_time((self.batches + 1) * self.groups, left, self.size, self.max_lag)

    def _own(self, version: int) -> int:
        return int(without_republished(version, self.republished))

    def _needed(self) -> int | None:
        """Return how many groups are needed in addition to the unconsumed ones; None without a limit."""
        if self._wanted is None:
            return None
        return self._wanted - self.batches * self.groups - len(self._unconsumed)

    def explain(self) -> str:
        """Say in one line what the next admission and the next batch wait for."""
        return f"{self.explain_admission()}; {self.explain_batch()}"

    def explain_admission(self) -> str:
        """Say what the next admission waits for."""
        if free := self.free:
            return f"{free} of {self.capacity} slots may be charged"
        needed = self._needed()
        if needed is not None and needed <= 0:
            return "nothing is admitted: the last version has all its groups"
        if self.occupied >= self.capacity:
            return (
                f"nothing is admitted: all {self.capacity} slots are taken ({self.in_flight} groups in flight, "
                f"{self.ready} ready, {self._training.total()} until the engines prove version {self.proved + 1})"
            )
        anchor = self._describe(next(iter(self._unconsumed)))
        return (
            f"nothing is admitted: the window of {self.capacity} groups is full behind {anchor}, "
            f"which {len(self._overtakers)} younger ones have overtaken"
        )

    def explain_batch(self) -> str:
        """Say what the next batch waits for."""
        if self._next_batch() is not None:
            return f"a batch for version {self.trained_version} is ready"
        unfinished = next((group_id for group_id in self._unconsumed if group_id not in self._ready), None)
        oldest = "none" if unfinished is None else self._describe(unfinished)
        ids = self._eligible()[: self.groups]
        if len(ids) < self.groups:
            return f"no batch: {self.ready} of {self.groups} groups are ready, the oldest unfinished one is {oldest}"
        return f"no batch: it has to wait for {oldest} ({self._hindrance(ids)})"

    def _describe(self, group_id: int) -> str:
        place = "ready, of" if group_id in self._ready else "in flight since"
        return f"group {group_id}, {place} version {self._unconsumed[group_id]}"


def _token_versions(group: Group) -> Int32Array:
    traces = [trace.versions[trace.trained] for rollout in group.usable for trace in rollout.traces]
    return np.concatenate(traces) if traces else np.empty(0, np.int32)
