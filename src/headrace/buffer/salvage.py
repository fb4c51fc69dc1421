"""What is left of work that has become too old: tokens as context, with the records that they were sampled with.

Nothing here changes a token, a log-probability or a version; only whether a token is trained.
"""

from __future__ import annotations

import msgspec

from headrace.types import Group, Rollout, Trace


def masked(group: Group, oldest: int) -> Group:
    """The group with every token of a version below `oldest` untrained."""

    def mask(trace: Trace) -> Trace:
        return msgspec.structs.replace(trace, trained=trace.trained & (trace.versions >= oldest))

    rollouts = [
        msgspec.structs.replace(rollout, traces=[mask(trace) for trace in rollout.traces]) for rollout in group.rollouts
    ]
    return msgspec.structs.replace(group, rollouts=rollouts)


def prefix_of(rollout: Rollout) -> Trace | None:
    """What a new attempt can begin with: the tokens of a first turn that was cut off, untrained; None if there is none.

    A rollout that ended has nothing to go on from, and what an environment knows after a turn cannot be given to
    another one.
    """
    if rollout.ending != "aborted" or rollout.metrics.get("turns", 1.0) > 0 or len(rollout.traces) != 1:
        return None
    [trace] = rollout.traces
    if not (trace.versions >= 0).any():
        return None
    return msgspec.structs.replace(trace, trained=trace.trained & False)
