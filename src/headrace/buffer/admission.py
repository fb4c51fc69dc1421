"""How far generation may run ahead: pure arithmetic, no state. `docs/staleness.md` holds the drawings.

Words: a batch has `groups` groups, `publish_every` batches make one version, so N = groups x publish_every groups make
one version. There are W = (depth + 1) x N slots. A group takes a slot before its generation starts and gives it back
when the engines have proved the weights that it trained, or when it is dropped or fails. A group that is neither is
*live*. Counted from the first version, version R is proved only after N x R live groups were consumed and released,
which gives the one inequality that everything here rests on:

    (slots)   right after an admission, live groups ever admitted <= W + N x R,   R = the version proved at that moment.

With oversampling more groups are started than there are slots, because some will be filtered. Then (slots) holds for
those that have a *seat*: at most W - 1 + N x R live groups are older than they. Only they are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from headrace.errors import HeadraceError
from headrace.types import Int32Array, without_republished

Depth = int | Literal["unbounded"]
"""An unbounded depth is as deep as `max_lag` lets work be of use."""


def version_size(groups: int, publish_every: int) -> int:
    """N: the groups that make one version."""
    return groups * publish_every


def effective_depth(depth: Depth, max_lag: int | None) -> int:
    """The depth that can be used: work that is `depth` versions ahead is `depth` versions old when it is trained.

    In strict age order the group with rank r (0-based, among live groups) is trained at version r // N. By (slots)
    r <= W - 1 + N x R, so its lag is at most depth, and a full buffer attains it. Slots beyond `max_lag` would
    therefore hold only groups that come too late.
    """
    if depth == "unbounded":
        if max_lag is None:
            raise HeadraceError("an unbounded depth needs max_lag")
        return max_lag
    return depth if max_lag is None else min(depth, max_lag)


def capacity(depth: Depth, groups: int, publish_every: int, max_lag: int | None = None) -> int:
    """W: the slots, which is also the width of the window that is anchored at the oldest unconsumed group."""
    return (effective_depth(depth, max_lag) + 1) * version_size(groups, publish_every)


def version_of_batch(batch: int, first_version: int, publish_every: int) -> int:
    """The version being trained by this batch (counted from 0): its groups make the next one."""
    return first_version + batch // publish_every


def lag_bound(depth: Depth, groups: int, publish_every: int, max_lag: int | None = None) -> int:
    """The largest lag that any token can have when it is consumed. It is attained: no smaller number is right.

    Depth 0: the N slots of a version are free again only after all N groups in them were trained, so nobody is left
    behind: 0. Otherwise let o be the oldest unconsumed group before a batch, admitted when R was proved. By (slots) at
    most W - 1 + N x R groups are older than o, and by the window at most W - 1 younger ones overtook it (`Window.free`
    says why). So at most 2W - 2 + N x R groups were consumed before, and the batch trains at most version
    R + (2W - 2) // N. No group of the batch was admitted before o, so none of its tokens is older than R. Without a
    window (an unbounded depth) nothing but `max_lag` limits who overtakes whom.
    """
    usable = effective_depth(depth, max_lag)
    if usable == 0 or depth == "unbounded":
        return usable
    window = capacity(depth, groups, publish_every, max_lag)
    overtaken = (2 * window - 2) // version_size(groups, publish_every)
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
    """How many groups may be admitted now, where at most `needed` more than the unconsumed ones are of any use.

    `span` counts the live groups from the oldest unconsumed one on, itself included: those that overtook it too. A full
    window still admits up to one batch of unconsumed groups: otherwise those that overtook could leave too few behind
    for a batch, and nothing would ever move again. That never lets anyone overtake: the batch that these groups
    complete needs every unconsumed group, the oldest one first of all.

    With `spares`, groups that are expected to be filtered take no slot: the share `filtered` of those in flight, at
    most `spares` of them.
    """
    admitted = 0
    while True:  # it ends: `lost` grows more slowly than `admitted`, and not beyond `spares`
        lost = min(spares, int(filtered * (in_flight + admitted + 1)))
        room = min(capacity - occupied + lost, max(capacity - span + lost, groups - unconsumed))
        if needed is not None:
            room = min(room, needed + lost)
        if admitted >= room:
            return admitted
        admitted += 1


def spare_slots(oversample: float, capacity: int) -> int:
    """Groups that may be under way beyond the slots."""
    return int((oversample - 1.0) * capacity)


def seated(older: int, version: int, capacity: int, size: int) -> bool:
    """Whether a group admitted at `version` (counted from the first one), with so many live older groups, has a seat.

    Older groups only ever leave, so a seat is kept. Without spares every group has one from its admission on: that is
    (slots).
    """
    return older < capacity + size * version


def late(version: int, trained_version: int, max_lag: int | None) -> bool:
    """Whether a token of `version` may no longer be trained: the next batch trains `trained_version`."""
    return max_lag is not None and trained_version - version > max_lag


def oldest_on_time(trained_version: int, max_lag: int, republished: Sequence[int] = ()) -> int:
    """The oldest version whose tokens may still be trained where the next batch trains `trained_version`."""
    oldest = version = int(without_republished(trained_version, republished)) - max_lag
    while without_republished(version, republished) < oldest:
        version += 1
    return version


def on_time(consumed: int, left: Sequence[int | None], size: int, max_lag: int) -> bool:
    """Whether, after `consumed` groups, all groups left behind can still be trained within `max_lag`.

    `left` holds their versions (counted from the first one, None without a seat), oldest group first. Strict age order
    is the best that can follow: the i-th of them is then trained at version (consumed + i) // size. It is not enough
    that each alone is still in time, because many may fall due together. A batch in strict age order keeps a true
    answer true, and so does an admission: by (slots) the newest group has consumed + i <= W - 1 + N x R, and the depth
    is at most `max_lag`. So does a group that gets its seat: nobody younger was consumed before it, so the same holds.
    Hence waiting for the oldest groups is always a way forward, never a deadlock, as long as every group ends.
    """
    return all(version is None or (consumed + i) // size - version <= max_lag for i, version in enumerate(left))


def check_lag(version: int, versions: Int32Array, bound: int, republished: Sequence[int] = ()) -> None:
    """Assert the bound for every trained token of what is about to be consumed at `version`."""
    if not len(versions):
        return
    lags = without_republished(version, republished) - without_republished(versions, republished)
    lag, lead = int(lags.max()), -int(lags.min())
    if lag > bound:
        raise HeadraceError(f"a token of lag {lag} is about to be trained at version {version}, the bound is {bound}")
    if lead > 0:
        raise HeadraceError(f"a token of version {version + lead} is about to be trained at version {version}")
