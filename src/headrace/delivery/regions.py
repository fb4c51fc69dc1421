"""Rectangular regions of tensors, and what must be copied where so that regions held by some become regions wanted by
others.

A wanted region is filled by disjoint pieces that leave no element out, or there is no plan. Pure arithmetic on offsets
and sizes: no torch here.
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
        """How many elements."""
        return math.prod(self.shape)

    def within(self, outer: Region) -> tuple[slice, ...]:
        """Where this region lies in a tensor that holds `outer` and nothing else."""
        return tuple(
            slice(mine - theirs, mine - theirs + length)
            for mine, theirs, length in zip(self.start, outer.start, self.shape, strict=True)
        )


class Copy(msgspec.Struct, frozen=True):
    """One piece of a wanted tensor, and the part that has it."""

    part: int
    name: str
    region: Region
    """In the whole tensor."""


def whole(shape: Sequence[int]) -> Region:
    """All of a tensor."""
    return Region((0,) * len(shape), tuple(shape))


def intersection(first: Region, second: Region) -> Region | None:
    """What two regions have in common; None where that is nothing."""
    start, shape = [], []
    for a, m, b, n in zip(first.start, first.shape, second.start, second.shape, strict=True):
        low, high = max(a, b), min(a + m, b + n)
        if high <= low:
            return None
        start.append(low)
        shape.append(high - low)
    return Region(tuple(start), tuple(shape))


def chunk(region: Region, dim: int, count: int, index: int) -> Region:
    """The piece `index` of `count` along a dimension: all but the last ones equal, those smaller or empty."""
    length = region.shape[dim]
    step = -(-length // count)
    low, high = min(index * step, length), min((index + 1) * step, length)
    start, shape = list(region.start), list(region.shape)
    start[dim] += low
    shape[dim] = high - low
    return Region(tuple(start), tuple(shape))


def plan_copies(held: Sequence[Mapping[str, Region]], wanted: Mapping[str, Region]) -> list[Copy]:
    """What to copy from which part, so that every element that is wanted is copied exactly once.

    `held` are the regions of each part by name. Raises `DeliveryError` where elements are missing or held twice.
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
