"""Where every admitted group is: in flight, ready, in training (consumed, its slot not yet free) or gone.

A group is in exactly one of these places, and every move that would break this is an error. Of consumed groups those
are remembered that overtook an older one.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import HeadraceError
from headrace.types import Group


class GroupPlaces:
    """Groups by id; ids increase with age, and each is entered once."""

    def __init__(self) -> None:
        self.unconsumed: dict[int, int] = {}
        """Group id -> version proved at its admission, oldest first. `Group.version` may be newer on one engine."""
        self.ready: dict[int, Group] = {}
        """Of these, the complete ones."""
        self.overtakers: set[int] = set()
        """Consumed groups that are younger than the oldest unconsumed one."""
        self._training: dict[int, int] = {}
        """Version being trained -> groups consumed for it whose slots are not free."""
        self._last_id: int | None = None

    @property
    def in_flight(self) -> int:
        """Groups that are being generated or scored."""
        return len(self.unconsumed) - len(self.ready)

    @property
    def in_training(self) -> int:
        """Consumed groups whose slots are not free."""
        return sum(self._training.values())

    @property
    def occupied(self) -> int:
        """Slots in use."""
        return len(self.unconsumed) + self.in_training

    def enter(self, group_id: int, version: int, how: str) -> None:
        """A group takes a slot while the engines have proved `version`."""
        if self._last_id is not None and group_id <= self._last_id:
            raise HeadraceError(f"group {group_id} was {how} after group {self._last_id}: ids must increase")
        self._last_id = group_id
        self.unconsumed[group_id] = version

    def complete(self, group: Group) -> None:
        """A group in flight is ready."""
        if group.id not in self.unconsumed or group.id in self.ready:
            raise HeadraceError(f"group {group.id} was completed but is not in flight")
        self.ready[group.id] = group

    def leave(self, group_id: int, how: str) -> None:
        """A group that is not consumed is gone."""
        if self.unconsumed.pop(group_id, None) is None:
            raise HeadraceError(f"group {group_id} was {how} but is neither in flight nor ready")
        self.ready.pop(group_id, None)
        self._forget_overtakers()

    def consume(self, ids: list[int], version: int) -> list[Group]:
        """Ready groups go into training, at this version."""
        self._training[version] = self._training.get(version, 0) + len(ids)
        for group_id in ids:
            del self.unconsumed[group_id]
        self.overtook(ids)
        return [self.ready.pop(group_id) for group_id in ids]

    def overtook(self, ids: list[int]) -> None:
        """These are consumed; the younger ones of them than the oldest unconsumed group have overtaken it."""
        self.overtakers.update(ids)
        self._forget_overtakers()

    def free(self, trained: Callable[[int], bool]) -> None:
        """Groups consumed for versions of which this is true are gone."""
        self._training = {version: groups for version, groups in self._training.items() if not trained(version)}

    def oldest_unfinished(self) -> str:
        """The group that everybody waits for, in words."""
        oldest = next((group_id for group_id in self.unconsumed if group_id not in self.ready), None)
        return "none" if oldest is None else self.describe(oldest)

    def describe(self, group_id: int) -> str:
        """Where a group that is not consumed is, in words."""
        place = "ready, of" if group_id in self.ready else "in flight since"
        return f"group {group_id}, {place} version {self.unconsumed[group_id]}"

    def _forget_overtakers(self) -> None:
        oldest = next(iter(self.unconsumed), None)
        self.overtakers = {i for i in self.overtakers if oldest is not None and i > oldest}
