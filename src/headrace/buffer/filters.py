"""Filters decide which rollouts, groups and tokens are worth training. They are pure functions of a scored group.

Single rollouts leave a group: stragglers that were cut off, and answers that were cut at their length limit. A group
with too few rollouts left, or with nothing to compare, leaves as a whole, and another group is generated in its place.

Salvage keeps tokens that have become too old as untrained context. It changes no token, log-probability or version,
only the mark whether a token is trained.
"""

from collections.abc import Collection
from typing import Literal, NamedTuple, get_args

import msgspec

from headrace.types import LOW_SCORE, Group, Rollout, Trace

Filter = Literal["zero_variance", "overlong"]
FILTERS: tuple[str, ...] = get_args(Filter)
CONFIGURED = ("overlong", LOW_SCORE)
"""The reasons why a rollout is removed that follow from the configuration."""
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
        return FilteredGroup(kept, removed, next((why for why in CONFIGURED if why in removed.values()), ""))
    rewards = [rollout.reward for rollout in kept.usable]
    if "zero_variance" in filters and len(set(rewards)) == 1:
        return FilteredGroup(kept, removed, "zero_variance")
    return FilteredGroup(kept, removed)


def _unwanted(rollout: Rollout, filters: Collection[Filter]) -> str:
    if rollout.ending == "aborted":
        return rollout.reason
    return "overlong" if rollout.ending == "truncated" and "overlong" in filters else ""


def masked(group: Group, oldest: int) -> Group:
    """Return the group with every token of a version below `oldest` marked as untrained."""

    def mask(trace: Trace) -> Trace:
        return msgspec.structs.replace(trace, trained=trace.trained & (trace.versions >= oldest))

    rollouts = [
        msgspec.structs.replace(rollout, traces=[mask(trace) for trace in rollout.traces]) for rollout in group.rollouts
    ]
    return msgspec.structs.replace(group, rollouts=rollouts)


def prefix_of(rollout: Rollout) -> Trace | None:
    """Return the tokens, untrained, that a new attempt can begin with; None if there are none.

    Only a first turn that was cut off gives such tokens. A rollout that ended has nothing to continue, and after a turn
    the state of its environment cannot be given to another environment.
    """
    if rollout.ending != "aborted" or rollout.metrics.get("turns", 1.0) > 0 or len(rollout.traces) != 1:
        return None
    [trace] = rollout.traces
    if not (trace.versions >= 0).any():
        return None
    return msgspec.structs.replace(trace, trained=trace.trained & False)
