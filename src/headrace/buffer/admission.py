"""The arithmetic of how far generation may run ahead of training. It is pure and has no state.

`docs/staleness.md` states the rules exactly ("The rules behind the bound") and proves what is claimed here. A batch has
`groups` groups and `publish_every` batches make one version, so N = groups x publish_every groups make one version.
There are W = (depth + 1) x N slots. A group takes a slot before its generation starts. It frees the slot when the
engines have proved the weights that it trained, or when it is dropped or fails. A group is *live* unless it was dropped
or failed.
"""

from collections.abc import Sequence
from typing import Literal

from headrace.errors import HeadraceError
from headrace.types import Int32Array, without_republished

Depth = int | Literal["unbounded"]
"""With `unbounded`, `max_lag` alone decides how far generation may run ahead."""


def effective_depth(depth: Depth, max_lag: int | None) -> int:
    """Return the depth that is of use, which is never more than `max_lag`.

    Work that is `depth` versions ahead is `depth` versions old when it is trained in strict age order. So slots beyond
    `max_lag` would hold only groups that come too late.
    """
    if depth == "unbounded":
        if max_lag is None:
            raise HeadraceError("an unbounded depth needs max_lag")
        return max_lag
    return depth if max_lag is None else min(depth, max_lag)


def capacity(depth: Depth, groups: int, publish_every: int, max_lag: int | None = None) -> int:
    """Return W, the number of slots. W is also the width of the window that starts at the oldest unconsumed group."""
    return (effective_depth(depth, max_lag) + 1) * groups * publish_every


def lag_bound(depth: Depth, groups: int, publish_every: int, max_lag: int | None = None) -> int:
    """Return the largest lag that any token can have when it is consumed. The bound is tight: this lag can occur.

    At depth 0 the N slots of a version are free again only after all N groups in them were trained. Otherwise at most
    2W - 2 groups are trained between a group's admission and its own batch. An unbounded depth has no window: only
    `max_lag` limits how far groups overtake each other.
    """
    usable = effective_depth(depth, max_lag)
    if usable == 0 or depth == "unbounded":
        return usable
    window = capacity(depth, groups, publish_every, max_lag)
    overtaken = (2 * window - 2) // (groups * publish_every)
    return overtaken if max_lag is None else min(overtaken, max_lag)


def admissible(
    occupied: int,
    span: int,
    unconsumed: int,
    capacity: int,
    groups: int,
    *,
    in_flight: int = 0,
    filtered: float = 0.0,
    spares: int = 0,
    needed: int | None = None,
) -> int:
    """Return how many groups may be admitted now. At most `needed` more than the unconsumed groups are of any use.

    `span` counts the live groups from the oldest unconsumed one on, including that group and those that overtook it. A
    full window still admits groups until one batch is unconsumed. Otherwise overtaking groups could leave too few
    groups for a batch, and nothing would ever move again.

    With `spares`, groups that are expected to be filtered take no slot. They are the share `filtered` of the groups in
    flight, and at most `spares`.
    """
    admitted = 0
    while True:  # This ends: `lost` grows more slowly than `admitted` and never beyond `spares`.
        lost = min(spares, int(filtered * (in_flight + admitted + 1)))
        room = min(capacity - occupied + lost, max(capacity - span + lost, groups - unconsumed))
        if needed is not None:
            room = min(room, needed + lost)
        if admitted >= room:
            return admitted
        admitted += 1


def oldest_on_time(trained_version: int, max_lag: int, republished: Sequence[int] = ()) -> int:
    """Return the oldest version whose tokens may still be trained if the next batch trains `trained_version`."""
    oldest = version = int(without_republished(trained_version, republished)) - max_lag
    while without_republished(version, republished) < oldest:
        version += 1
    return version


def on_time(consumed: int, left: Sequence[int | None], size: int, max_lag: int) -> bool:
    """Return whether, after `consumed` groups, all groups left behind can still be trained within `max_lag`.

    `left` holds the version at admission of each group left behind, oldest group first. A version is counted from the
    first one; None stands for a group without a seat. The best order that can follow is strict age order: the i-th
    group is then trained at version (consumed + i) // size. It is not enough that each group alone is still in time,
    because many groups may fall due together.
    """
    return all(version is None or (consumed + i) // size - version <= max_lag for i, version in enumerate(left))


def check_lag(version: int, versions: Int32Array, bound: int, republished: Sequence[int] = ()) -> None:
    """Raise `HeadraceError` if a token that is about to be trained at `version` has a lag over the bound or below 0."""
    if not len(versions):
        return
    lags = without_republished(version, republished) - without_republished(versions, republished)
    lag, lead = int(lags.max()), -int(lags.min())
    if lag > bound:
        raise HeadraceError(f"a token of lag {lag} is about to be trained at version {version}, the bound is {bound}")
    if lead > 0:
        raise HeadraceError(
            f"a token of lag {-lead} is about to be trained at version {version}, so it is of a later version"
        )
