"""The share of the latest groups that was filtered. Oversampling starts more groups to make up for this share.

Groups are counted in the order of their age, when a younger group is consumed. So the rate does not depend on which
group finished first.
"""

from __future__ import annotations

from collections import deque


class FilterRate:
    """The rate of filtered groups, measured over the last `memory` groups."""

    def __init__(self, memory: int) -> None:
        self._outcomes: deque[bool] = deque(maxlen=memory)
        """Whether each of the latest groups was filtered, up to the youngest consumed group."""
        self._filtered: list[int] = []
        """The filtered groups that are not counted yet."""

    @property
    def value(self) -> float:
        """The rate; 0 before the first batch."""
        return sum(self._outcomes) / len(self._outcomes) if self._outcomes else 0.0

    def filtered(self, group_id: int) -> None:
        """Record that this group was filtered."""
        self._filtered.append(group_id)

    def consumed(self, ids: list[int]) -> None:
        """Count the groups of a batch, given oldest first, and the filtered groups older than the youngest of them."""
        settled = [group_id for group_id in self._filtered if group_id < ids[-1]]
        self._filtered = [group_id for group_id in self._filtered if group_id > ids[-1]]
        self._outcomes.extend([True] * len(settled) + [False] * len(ids))
