"""Rectangular regions of tensors, and the plan of copies that fills wanted regions from regions that others hold.

A plan fills every wanted region with disjoint pieces that leave no element out; if that is impossible, there is no
plan. This module is pure arithmetic on offsets and sizes and does not import torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import DeliveryError

Shape = tuple[int, ...]


class Region(msgspec.Struct, frozen=True):
    """The elements `start .. start + shape` of a tensor, in every dimension."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Return the slices of this region in a tensor that holds exactly the region `outer`."""
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.start, outer.start, self.shape, strict=True)
        )


class Copy(msgspec.Struct, frozen=True):
    """One piece of a wanted tensor, and the number of the part that holds it."""

    part: int
    name: str
    region: Region
    """The region of the piece in the whole tensor."""


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is a whole tensor of this shape."""
    return Region((0,) * len(shape), tuple(shape))


def intersection(first: Region, second: Region) -> Region | None:
    """Return the common elements of two regions; None if there are none."""
    start, shape = [], []
    for a, m, b, n in zip(first.start, first.shape, second.start, second.shape, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if high <= low:
            return None
        start.append(low)
        shape.append(high - low)
    return Region(tuple(start), tuple(shape))


def chunk(region: Region, dim: int, count: int, index: int) -> Region:
    """Return piece `index` of `count` along a dimension. Pieces have equal size; the last may be smaller or empty."""
    length = region.shape[dim]
    step = -(-length // count)
    low, high = min(index * step, length), min((index + 1) * step, length)
    start, shape = list(region.start), list(region.shape)
    start[dim] += low
    shape[dim] = high - low
    return Region(tuple(start), tuple(shape))


def plan_copies(held: Sequence[Mapping[str, Region]], wanted: Mapping[str, Region]) -> list[Copy]:
    """Return the copies that bring every wanted element exactly once.

    `held` has the regions of each part by name. Raises `DeliveryError` if an element is missing or held twice.
    """
    copies: list[Copy] = []
    for name, target in wanted.items():
        found = [
            Copy(part, name, common)
            for part, regions in enumerate(held)
            if name in regions and (common := intersection(regions[name], target))
        ]
        copied = sum(copy.region.size for copy in found)
        if any(intersection(a.region, b.region) for a, b in itertools.combinations(found, 2)):
            raise DeliveryError(f"{name} is held twice, in part")
        if copied != target.size:
            raise DeliveryError(f"{name} is incomplete: {copied} of {target.size} elements are held")
        copies += found
    return copies
