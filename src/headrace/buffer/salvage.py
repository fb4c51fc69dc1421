"""Salvage keeps tokens that have become too old as untrained context, with their original records.

Nothing here changes a token, a log-probability or a version. Only the mark whether a token is trained changes.
"""

from __future__ import annotations

import msgspec

from headrace.types import Group, Rollout, Trace


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
