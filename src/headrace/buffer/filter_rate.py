"""The share of the latest groups that was filtered, which oversampling makes up for.

Groups are counted by age, when a younger one is consumed: the rate does not depend on who came first.
"""

from __future__ import annotations

from collections import deque


class FilterRate:
    """Measured over the last `memory` groups."""

    def __init__(self, memory: int) -> None:
        self._outcomes: deque[bool] = deque(maxlen=memory)
        """Was it filtered? Of the latest groups, up to the youngest that was consumed."""
        self._filtered: list[int] = []
        """Filtered groups that are not among those yet."""

    @property
    def value(self) -> float:
        """0 before the first batch."""
        return sum(self._outcomes) / len(self._outcomes) if self._outcomes else 0.0

    def filtered(self, group_id: int) -> None:
        """This group was of no use for training."""
        self._filtered.append(group_id)

    def consumed(self, ids: list[int]) -> None:
        """A batch of these groups was taken, oldest first: count it, and what was filtered on the way to it."""
        settled = [group_id for group_id in self._filtered if group_id < ids[-1]]
        self._filtered = [group_id for group_id in self._filtered if group_id > ids[-1]]
        self._outcomes.extend([True] * len(settled) + [False] * len(ids))
