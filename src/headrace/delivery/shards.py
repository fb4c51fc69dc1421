"""Finds the region of a sharded tensor that a rank holds and owns, and copies pieces between regions.

Each element of a tensor has exactly one owner among the ranks: the rank whose region contains the element, and the
first of them if several ranks hold the same region. A rank finds out what it owns without communication, and no rank
ever holds a whole sharded tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from headrace.delivery.regions import Copy, Region, chunk, whole
from headrace.errors import DeliveryError


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


def copy_piece(copy: Copy, source: torch.Tensor, held: Region, target: torch.Tensor, wanted: Region) -> None:
    """Copy one piece from `source`, which is the region `held`, to `target`, which is the region `wanted`."""
    target[copy.region.within(wanted)].copy_(source[copy.region.within(held)])


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
