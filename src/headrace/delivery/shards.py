"""What a rank holds of sharded weights, and tensors put together from what several ranks hold.

Of every tensor each element has exactly one owner among the ranks: the rank whose region it is in, and of several that
hold the same region the first. No rank needs more than it holds to know this, and none ever holds a whole.
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
    """The region of a tensor of this shape at a coordinate of a mesh of these sizes."""
    region = whole(shape)
    # A strided shard cuts what a later dimension of the mesh has cut already; plain ones cut in the mesh's order.
    order = sorted(range(len(placements)), key=lambda axis: (_strided(placements[axis]), axis))
    for axis in order:
        dim = _cut_dimension(placements[axis])
        if dim is not None:
            region = chunk(region, dim, sizes[axis], coordinate[axis])
    return region


def held_region(tensor: torch.Tensor) -> Region:
    """What this rank holds of a tensor: all of it, unless it is sharded."""
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
    """This rank's own part of all weights, and where it lies; `coordinate` is the rank's place in the whole grid."""
    tensors: dict[str, torch.Tensor] = {}
    regions: dict[str, Region] = {}
    for name, tensor in weights.items():
        region = held_region(tensor)
        if region.size and not any(coordinate[axis] for axis in coordinate if axis not in _cut_axes(tensor)):
            tensors[name] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            regions[name] = region
    return tensors, regions


def copy_piece(copy: Copy, source: torch.Tensor, held: Region, target: torch.Tensor, wanted: Region) -> None:
    """Copy one piece from what holds one region of its tensor to what shall hold another."""
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
    """The dimensions of the mesh along which ranks hold different parts of it."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {n for n, placement in zip(names, tensor.placements, strict=True) if _cut_dimension(placement) is not None}
