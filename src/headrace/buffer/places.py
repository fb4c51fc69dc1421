"""The place of every admitted group: in flight, ready, in training (consumed, with its slot not yet free) or gone.

A group is in exactly one place, and every move that would break this raises an error. Consumed groups that overtook an
older group are remembered.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.types import Group


class GroupPlaces:
    """The places of all groups, by id. Younger groups have higher ids, and each group enters once."""

    def __init__(self) -> None:
        self.unconsumed: dict[int, int] = {}
        """The version proved at the admission of each unconsumed group, by group id, oldest first. `Group.version` may
        be newer, because its engine may have proved a newer version."""
        self.ready: dict[int, Group] = {}
        """The unconsumed groups that are complete."""
        self.overtakers: set[int] = set()
        """The consumed groups that are younger than the oldest unconsumed group."""
        self._training: dict[int, int] = {}
        """The number of groups that were consumed for each version and whose slots are not free, by version being
        trained."""
        self._last_id: int | None = None

    @property
    def in_flight(self) -> int:
        """The number of groups that are being generated or scored."""
        return len(self.unconsumed) - len(self.ready)

    @property
    def in_training(self) -> int:
        """The number of consumed groups whose slots are not free."""
        return sum(self._training.values())

    @property
    def occupied(self) -> int:
        """The number of slots in use."""
        return len(self.unconsumed) + self.in_training

    def enter(self, group_id: int, version: int, how: str) -> None:
        """Let a group take a slot, while the engines have proved `version`."""
        if self._last_id is not None and group_id <= self._last_id:
            raise HeadraceError(f"group {group_id} was {how} after group {self._last_id}: ids must increase")
        self._last_id = group_id
        self.unconsumed[group_id] = version

    def complete(self, group: Group) -> None:
        """Move a group from in flight to ready."""
        if group.id not in self.unconsumed or group.id in self.ready:
            raise HeadraceError(f"group {group.id} was completed but is not in flight")
        self.ready[group.id] = group

    def leave(self, group_id: int, how: str) -> None:
        """Remove a group that is not consumed."""
        if self.unconsumed.pop(group_id, None) is None:
            raise HeadraceError(f"group {group_id} was {how} but is neither in flight nor ready")
        self.ready.pop(group_id, None)
        self._forget_overtakers()

    def consume(self, ids: list[int], version: int) -> list[Group]:
        """Move ready groups into training at this version, and return them."""
        self._training[version] = self._training.get(version, 0) + len(ids)
        for group_id in ids:
            del self.unconsumed[group_id]
        self.overtook(ids)
        return [self.ready.pop(group_id) for group_id in ids]

    def overtook(self, ids: list[int]) -> None:
        """Record that these groups are consumed. Those younger than the oldest unconsumed group have overtaken it."""
        self.overtakers.update(ids)
        self._forget_overtakers()

    def free(self, trained: Callable[[int], bool]) -> None:
        """Free the slots of all groups consumed for a version for which `trained` returns True."""
        self._training = {version: groups for version, groups in self._training.items() if not trained(version)}

    def oldest_unfinished(self) -> str:
        """Describe the oldest group in flight, which all others wait for."""
        oldest = next((group_id for group_id in self.unconsumed if group_id not in self.ready), None)
        return "none" if oldest is None else self.describe(oldest)

    def describe(self, group_id: int) -> str:
        """Describe the place of an unconsumed group."""
        place = "ready, of" if group_id in self.ready else "in flight since"
        return f"group {group_id}, {place} version {self.unconsumed[group_id]}"

    def _forget_overtakers(self) -> None:
        oldest = next(iter(self.unconsumed), None)
        self.overtakers = {i for i in self.overtakers if oldest is not None and i > oldest}
