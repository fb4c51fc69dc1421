"""Which rollouts and groups are worth training: pure functions of a scored group.

Rollouts leave a group one by one (stragglers that were cut off, answers cut at their length limit); a group that has
too few left, or nothing to compare, leaves as a whole, and another one is generated in its place.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec

from headrace.types import Group, Rollout

Filter = Literal["zero_variance", "overlong"]
COMPARED = 2
"""Answers that a group needs, unless it has a single one by design."""


class FilteredGroup(NamedTuple):
    """What is left of a group."""

    group: Group
    """Without the rollouts that left."""
    left: dict[str, str]
    """Rollout id -> why it left."""
    reason: str = ""
    """Why the whole group is filtered, if it is."""


def sift(group: Group, filters: Collection[Filter]) -> FilteredGroup:
    """Apply the filters. Failed rollouts stay in the group, unused, and count as missing."""
    left = {rollout.id: why for rollout in group.rollouts if (why := _unwanted(rollout, filters))}
    kept = msgspec.structs.replace(group, rollouts=[rollout for rollout in group.rollouts if rollout.id not in left])
    if len(kept.usable) < min(COMPARED, len(group.rollouts)):
        # Of several causes the configured one is said; where only failures are missing it is no filter's doing.
        return FilteredGroup(kept, left, "overlong" if "overlong" in left.values() else "")
    rewards = [rollout.reward for rollout in kept.usable]
    if "zero_variance" in filters and len(set(rewards)) == 1:
        return FilteredGroup(kept, left, "zero_variance")
    return FilteredGroup(kept, left)


def _unwanted(rollout: Rollout, filters: Collection[Filter]) -> str:
    if rollout.ending == "aborted":
        return rollout.reason
    return "overlong" if rollout.ending == "truncated" and "overlong" in filters else ""
