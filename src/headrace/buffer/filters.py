"""Filters decide which rollouts and groups are worth training. They are pure functions of a scored group.

Single rollouts leave a group: stragglers that were cut off, and answers that were cut at their length limit. A group
with too few rollouts left, or with nothing to compare, leaves as a whole, and another group is generated in its place.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec

from headrace.types import Group, Rollout

Filter = Literal["zero_variance", "overlong"]
COMPARED = 2
"""The number of answers that a group needs, unless it was started with a single one."""


class FilteredGroup(NamedTuple):
    """The result of filtering a group."""

    group: Group
    """The group without the rollouts that were removed."""
    removed: dict[str, str]
    """The rollouts that were removed, and why, by rollout id."""
    reason: str = ""
    """Why the whole group is filtered; empty if it is not."""


def filter_group(group: Group, filters: Collection[Filter]) -> FilteredGroup:
    """Apply the filters. Failed rollouts stay in the group, are not used, and count as missing."""
    removed = {rollout.id: why for rollout in group.rollouts if (why := _unwanted(rollout, filters))}
    kept = msgspec.structs.replace(group, rollouts=[rollout for rollout in group.rollouts if rollout.id not in removed])
    if len(kept.usable) < min(COMPARED, len(group.rollouts)):
        # A configured filter that removed a rollout is the reason. Otherwise no filter is: the group fails.
        return FilteredGroup(kept, removed, "overlong" if "overlong" in removed.values() else "")
    rewards = [rollout.reward for rollout in kept.usable]
    if "zero_variance" in filters and len(set(rewards)) == 1:
        return FilteredGroup(kept, removed, "zero_variance")
    return FilteredGroup(kept, removed)


def _unwanted(rollout: Rollout, filters: Collection[Filter]) -> str:
    if rollout.ending == "aborted":
        return rollout.reason
    return "overlong" if rollout.ending == "truncated" and "overlong" in filters else ""
