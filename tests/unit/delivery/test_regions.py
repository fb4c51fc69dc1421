"""Regions of tensors: cut, found again in memory, digested and put together, each against plain indexing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from headrace.delivery.base import Canary, Entry, Manifest, Part
from headrace.delivery.digest import digest, digest_of_sums
from headrace.delivery.digest_sums import region_block_sums
from headrace.delivery.parts import Region, check_complete, chunk, fetch_parts, join_parts, placed_region, whole
from headrace.delivery.plan import make_plan
from headrace.errors import DeliveryError

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    """A shape, and regions that cut it up, some of them empty."""
    shape = draw(shapes)
    regions = [whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        dim, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))
        regions = [chunk(region, dim, count, index) for region in regions for index in range(count)]
    return shape, regions


@given(st.integers(0, 30), st.integers(1, 8))
def test_chunks_are_those_of_torch(length: int, count: int) -> None:
    expected = [len(piece) for piece in torch.arange(length).chunk(count)] if length else []
    found = [chunk(whole((length,)), 0, count, index) for index in range(count)]
    assert [region.shape[0] for region in found] == expected + [0] * (count - len(expected))
    assert [i for region in found for i in range(length)[region.slices[0]]] == list(range(length))


@given(partitions())
def test_digests_of_regions_add_up(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, regions = case
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    sums = [region_block_sums(tensor[region.slices], shape, region.start) for region in regions]
    assert digest_of_sums({("w", "float32"): np.sum(sums, axis=0, dtype=np.int32)}) == digest([("w", tensor)])


class Held:
    """A source with one part for each region of a tensor."""

    private = True

    def __init__(self, tensor: torch.Tensor, regions: list[Region]) -> None:
        self.parts = {f"part-{number}": tensor[region.slices] for number, region in enumerate(regions)}
        self.verified: list[str] = []

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        return {"w": self.parts[location]}

    def verify(self, location: str, version: int) -> None:
        self.verified.append(location)

    def close(self) -> None:
        pass


@given(partitions())
def test_what_was_cut_is_put_together(case: tuple[tuple[int, ...], list[Region]]) -> None:
    shape, regions = case
    tensor = torch.arange(float(np.prod(shape))).reshape(shape)
    source = Held(tensor, regions)
    manifest = Manifest(
        version=1,
        parent=0,
        step=1,
        transport="shm",
        location="",
        entries=list(make_plan([("w", "float32", shape)]).entries),
        plan_digest=0,
        digest=0,
        canary=Canary(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32)),
        parts=[
            Part(
                location=location,
                entries=[Entry(name="w", dtype="float32", shape=region.shape, offset=0, nbytes=4 * region.size)],
                starts=[region.start],
            )
            for location, region in zip(source.parts, regions, strict=True)
        ],
    )
    target = torch.full(shape, torch.nan)
    fetch_parts(source, manifest, {"w": target})
    assert torch.equal(target, tensor)
    assert source.verified == list(source.parts)


def test_missing_and_doubled_elements_are_refused() -> None:
    upper, lower = chunk(whole((4, 2)), 0, 2, 0), chunk(whole((4, 2)), 0, 2, 1)
    check_complete([{"w": upper}, {"w": lower}], {"w": (4, 2)})
    with pytest.raises(DeliveryError, match="w is incomplete: 4 of 8 elements are held"):
        check_complete([{"w": upper}], {"w": (4, 2)})
    with pytest.raises(DeliveryError, match="w is held twice, in part"):
        check_complete([{"w": upper}, {"w": lower}, {"w": Region((1, 0), (1, 2))}], {"w": (4, 2)})
    with pytest.raises(DeliveryError, match="v is incomplete: 0 of 8"):
        check_complete([{"w": upper}], {"v": (4, 2)})
    assert not upper.overlaps(lower) and upper.overlaps(Region((1, 1), (2, 1)))


@given(st.integers(1, 13), st.integers(1, 3), st.integers(1, 3))
def test_shards_of_slices(rows: int, data_ranks: int, tensor_ranks: int) -> None:
    """A matrix cut by output over `tensor` and then by row over `data`, as torch cuts it; the other axis likewise."""
    tensor = torch.arange(rows * 6).reshape(rows, 6)
    sizes = (data_ranks, tensor_ranks)
    for data in range(data_ranks):
        for place_ in range(tensor_ranks):
            slices = tensor.tensor_split([min(i * -(-rows // tensor_ranks), rows) for i in range(1, tensor_ranks)])
            mine = slices[place_]
            step = -(-len(mine) // data_ranks)
            expected = mine[data * step : (data + 1) * step]
            cut = (_StridedShard(0, split_factor=tensor_ranks), Shard(0))
            region = placed_region(tensor.shape, cut, sizes, (data, place_))
            assert torch.equal(tensor[region.slices], expected)
            by_input = placed_region(tensor.shape, (Shard(0), Shard(1)), sizes, (data, place_))
            assert by_input.start[1] == min(place_ * -(-6 // tensor_ranks), 6)
            same = placed_region(tensor.shape, (Shard(0), Replicate()), sizes, (data, place_))
            assert same == chunk(whole(tensor.shape), 0, data_ranks, data)


def test_a_tensor_without_elements_is_in_no_part_but_in_the_digest() -> None:
    plan = make_plan([("w", "float32", (4, 2)), ("none", "float32", (0, 2))])
    weights = {"w": torch.arange(8.0).reshape(4, 2), "none": torch.zeros(0, 2)}
    entries = [entry for entry in plan.entries if entry.nbytes]
    manifest = Manifest(
        version=1,
        parent=0,
        step=1,
        transport="shm",
        location="",
        entries=list(plan.entries),
        plan_digest=plan.digest,
        digest=0,
        canary=Canary(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32)),
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        part = Part(location="a", entries=entries, starts=[(0, 0)])
        join_parts(manifest, part, {"w": weights["w"]}, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert manifest.digest == digest(weights.items())
