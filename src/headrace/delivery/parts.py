"""A version in parts: each rank of a trainer publishes the regions that it owns, and an engine assembles all parts.

Every rank writes its part through its own sender and computes the digest sums of what it wrote. The sums of all parts
give the digest of the whole. Rank 0 completes the manifest after every part is written. No rank sees another rank's
weights. An engine checks each part against its own place before and after it reads the part.

Each element of a tensor has exactly one owner among the ranks: the rank whose region contains the element, and the
first of them if several ranks hold the same region. A rank finds out what it owns without communication, and no rank
ever holds a whole sharded tensor.

With deltas, every rank keeps the bytes of its own part and publishes what changed in them. An engine applies each delta
to a copy of the same region of its live weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from headrace.delivery.base import Manifest, Part
from headrace.delivery.copying import copy_all
from headrace.delivery.delta import apply
from headrace.delivery.digest import digest_of_sums
from headrace.delivery.digest_sums import Sums, count_sums, region_block_sums
from headrace.delivery.plan import packed_bytes, unpack
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION

Shape = tuple[int, ...]


class Region(msgspec.Struct, frozen=True):
    """The elements `start .. start + shape` of a tensor, in every dimension."""

    start: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices of this region in the whole tensor."""
        return tuple(slice(at, at + length) for at, length in zip(self.start, self.shape, strict=True))

    def overlaps(self, other: Region) -> bool:
        """Return whether the two regions have an element in common."""
        sides = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return all(max(a, b) < min(a + m, b + n) for a, m, b, n in sides)


def whole(shape: Sequence[int]) -> Region:
    """Return the region that is a whole tensor of this shape."""
    return Region((0,) * len(shape), tuple(shape))


def chunk(region: Region, dim: int, count: int, index: int) -> Region:
    """Return piece `index` of `count` along a dimension. Pieces have equal size; the last may be smaller or empty."""
    length = region.shape[dim]
    step = -(-length // count)
    low, high = min(index * step, length), min((index + 1) * step, length)
    start, shape = list(region.start), list(region.shape)
    start[dim] += low
    shape[dim] = high - low
    return Region(tuple(start), tuple(shape))


def check_complete(held: Sequence[Mapping[str, Region]], shapes: Mapping[str, Shape]) -> None:
    """Raise `DeliveryError` unless the regions of all parts, by name, cover every element exactly once."""
    for name, shape in shapes.items():
        found = [regions[name] for regions in held if name in regions]
        if any(a.overlaps(b) for a, b in itertools.combinations(found, 2)):
            raise DeliveryError(f"{name} is held twice, in part")
        size = sum(region.size for region in found)
        if size != math.prod(shape):
            raise DeliveryError(f"{name} is incomplete: {size} of {math.prod(shape)} elements are held")


def placed_region(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> Region:
    """Return the region of a tensor of this shape at a coordinate of a mesh with these sizes."""
    region = whole(shape)
    # Plain shards are cut in the order of the mesh's dimensions. A strided shard is cut last, because it divides what
    # a later dimension of the mesh has cut already.
    order = sorted(range(len(placements)), key=lambda axis: (_strided(placements[axis]), axis))
    for axis in order:
        dim = _cut_dimension(placements[axis])
        if dim is not None:
            region = chunk(region, dim, sizes[axis], coordinate[axis])
    return region


def held_region(tensor: torch.Tensor) -> Region:
    """Return the region of a tensor that this rank holds: all of the tensor, unless it is sharded."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise DeliveryError("a rank outside of a tensor's mesh holds nothing of it")
    region = placed_region(tensor.shape, tensor.placements, mesh.shape, coordinate)
    if region.shape != tuple(tensor.to_local().shape):
        raise DeliveryError(f"a shard of shape {tuple(tensor.to_local().shape)} lies where {region.shape} was expected")
    return region


def owned_shards(
    weights: Mapping[str, torch.Tensor], coordinate: Mapping[str, int]
) -> tuple[dict[str, torch.Tensor], dict[str, Region]]:
    """Return the shards that this rank owns, and their regions; `coordinate` is its position in the whole grid."""
    tensors: dict[str, torch.Tensor] = {}
    regions: dict[str, Region] = {}
    for name, tensor in weights.items():
        region = held_region(tensor)
        if region.size and not any(coordinate[axis] for axis in coordinate if axis not in _cut_axes(tensor)):
            tensors[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            regions[name] = region
    return tensors, regions


def _strided(placement: Placement) -> bool:
    return type(placement).__name__ == "_StridedShard"


def _cut_dimension(placement: Placement) -> int | None:
    if placement.is_replicate():
        return None
    if isinstance(placement, Shard) or _strided(placement):
        return int(placement.dim)  # type: ignore[attr-defined]
    raise DeliveryError(f"weights that are placed as {placement} cannot be published")


def _cut_axes(tensor: torch.Tensor) -> set[str]:
    """Return the mesh dimensions along which ranks hold different parts of the tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {n for n, placement in zip(names, tensor.placements, strict=True) if _cut_dimension(placement) is not None}


class TrainerRanks(NamedTuple):
    """The ranks of a trainer, as their publishers see them."""

    group: dist.ProcessGroup
    """A group of all ranks that works in host memory and is used for nothing else."""
    resending: dist.ProcessGroup
    """Another such group. A version is sent again while a later one is published, in another thread."""
    coordinate: Mapping[str, int]
    """The position of this rank in the grid of ranks, by axis."""


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which a rank describes its part to rank 0."""

    version: int
    part: Part | None
    """The part; None if the rank owns nothing."""
    base: int = NO_VERSION
    """The version that the part changes, if the part is a delta."""
    sums: dict[str, bytes] = {}
    """The digest sums of the part, by tensor; see `delivery.digest`."""
    problem: str = ""
    """The reason why the part cannot be fetched; empty if it can."""


def join_parts(
    manifest: Manifest,
    part: Part | None,
    written: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    *,
    base: int = NO_VERSION,
    problem: str = "",
) -> None:
    """Complete the manifest, together with all ranks: on rank 0 with all parts, on others with the rank's own part.

    `written` are the tensors of this rank's part, as they were written. `base` is the version that a delta changes.
    `problem` is the reason why this rank has no part to offer, or empty. With a problem, `DeliveryError` is raised on
    this rank and on rank 0, but only after all ranks have met, so that no rank waits for the one that failed.
    """
    full = {entry.name: entry.shape for entry in manifest.entries}
    regions = part_regions(part) if part is not None else {}
    sums = {
        name: region_block_sums(tensor, full[name], regions[name].start).tobytes() for name, tensor in written.items()
    }
    mine = _Written(version=manifest.version, part=part, base=base, sums=sums, problem=problem)
    told = _gather(mine, group)
    _set_parts(manifest, told or [mine])
    if told:
        manifest.digest = _digest(manifest, told)


def join_resent(manifest: Manifest, part: Part | None, group: dist.ProcessGroup, problem: str = "") -> Manifest:
    """Return a manifest of the same version in which every part is sent in full, not as a delta; see `join_parts`."""
    whole_again = msgspec.structs.replace(manifest)
    mine = _Written(version=manifest.version, part=part, problem=problem)
    _set_parts(whole_again, _gather(mine, group) or [mine])
    return whole_again


def _set_parts(manifest: Manifest, told: list[_Written]) -> None:
    """Set the parts of a manifest, and its kind and base, from the messages of all ranks."""
    if problems := [one.problem for one in told if one.problem]:
        raise DeliveryError(problems[0])
    if any(one.version != manifest.version for one in told):
        raise DeliveryError(f"ranks publish different versions: {sorted({one.version for one in told})}")
    manifest.parts = [one.part for one in told if one.part is not None]
    bases = {one.base for one in told if one.part is not None and one.part.payload is not None}
    if len(bases) > 1:
        raise DeliveryError(f"ranks publish changes to different versions: {sorted(bases)}")
    if manifest.kind != "adapter":
        manifest.kind, manifest.base = ("delta", bases.pop()) if bases else ("full", NO_VERSION)


def part_regions(part: Part) -> dict[str, Region]:
    """Return the region of the whole tensor that each tensor of a part is."""
    return {entry.name: Region(start, entry.shape) for entry, start in zip(part.entries, part.starts, strict=True)}


def fetch_parts(
    source: Source,
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    live: Mapping[str, torch.Tensor] | None = None,
    writing: Callable[[], None] = lambda: None,
) -> None:
    """Fill the targets, which are the manifest's whole tensors, from all parts. The caller checks the digest.

    `live` are the weights that parts of a delta change. They are only read, and without them a delta is refused.
    `writing` is called when a part has arrived, before a target is written. Raises `DeliveryError` unless the parts
    hold every element exactly once and do not change while being read.
    """
    held = [part_regions(part) for part in manifest.parts]
    # Checked before a byte is read, because the manifest alone shows whether an element is missing.
    check_complete(held, {entry.name: entry.shape for entry in manifest.entries})
    for part, regions in zip(manifest.parts, held, strict=True):
        # One part at a time, because a source may use the same memory for the next part.
        published = source.open(part.location, manifest.version, part.payload or part.entries)
        if part.payload is not None:
            if live is None:
                raise DeliveryError(f"version {manifest.version} is a change, and there are no weights to change")
            published = _patched(part, published, {name: live[name][at.slices] for name, at in regions.items()})
        writing()
        for name, tensor in published.items():
            targets[name][regions[name].slices].copy_(tensor)
        source.verify(part.location, manifest.version)


def _patched(
    part: Part, published: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a part from its delta and from the regions that the delta changes."""
    if len(published) != 1:
        raise DeliveryError("a part is a change without its one payload")
    device = next(iter(held.values())).device
    packed = torch.empty(packed_bytes(part.entries), dtype=torch.uint8, device=device)
    tensors = unpack(packed, part.entries)
    copy_all(tensors, held)
    apply(next(iter(published.values())), packed)
    return tensors


def _digest(manifest: Manifest, told: list[_Written]) -> int:
    """Return the digest of the whole tensors from the sums of their parts, which are added with wrap-around."""
    found: dict[tuple[str, str], Sums] = {}
    for entry in manifest.entries:
        parts = [np.frombuffer(one.sums[entry.name], np.int32) for one in told if entry.name in one.sums]
        # A tensor without elements is in no part.
        found[entry.name, entry.dtype] = sum(parts, np.zeros(count_sums(entry.nbytes), np.int32))
    return digest_of_sums(found)


def _gather(mine: _Written, group: dist.ProcessGroup) -> list[_Written]:
    """Return the messages of all ranks on rank 0, and nothing on other ranks. Uses msgspec, so no pickle is sent."""
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(text, (0, longest - len(text)))
    first = dist.get_rank(group) == 0
    texts = [torch.empty_like(padded) for _ in lengths] if first else None
    dist.gather(padded, texts, group=group, group_dst=0)
    return [
        msgspec.msgpack.decode(text.numpy()[: int(length)].tobytes(), type=_Written)
        for text, length in zip(texts or (), lengths, strict=False)
    ]
