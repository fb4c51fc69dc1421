from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from attention_cases import Case, World, check_decode, check_prefill, with_options
from headrace.engines.embedded.kernels.attention import choose_splits, paged_decode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BASE = Case((1, 2, 0, 63, 64, 65, 129, 1000, 320), kv_heads=4, size=64)
COUNTS = (1, 2, 0, 63, 10, 65, 128, 700, 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", with_options(BASE), ids=str)
def test_attention_equals_float64(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    for splits in (1, 8):
        check_decode(case, device="cuda", splits=splits)
    check_prefill(case, COUNTS, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 80, 96, 128, 256])
def test_heads_of_any_size(size: int, dtype: torch.dtype) -> None:
    case = replace(BASE, size=size, kv_heads=2, group=3, dtype=dtype)
    check_decode(case, device="cuda", splits=2)
    check_prefill(case, COUNTS, device="cuda")


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(seed: int) -> None:
    draw = random.Random(seed)
    case = Case(
        lengths=(7, *(draw.choice((0, 1, draw.randint(2, 100), draw.randint(100, 1500))) for _ in range(11))),
        kv_heads=draw.choice((1, 2, 3, 8)),
        group=draw.choice((1, 3, 4, 8, 17)),
        size=draw.choice((16, 64, 72, 128)),
        value_size=draw.choice((None, 48, 64)),
        block_size=draw.choice((8, 16, 24, 32, 64, 128)),
        window=draw.choice((None, None, draw.randint(1, 600))),
        softcap=draw.choice((None, 20.0)),
        sinks=draw.random() < 0.3,
        dtype=draw.choice(DTYPES),
    )
    splits, tile = draw.choice((1, 2, 3, 8, 32)), draw.choice((16, 32, 64))
    check_decode(case, device="cuda", splits=splits, tile=tile, seed=seed)
    check_prefill(case, (7, *(draw.randint(0, n) for n in case.lengths[1:])), device="cuda", seed=seed)


def test_a_captured_decode_follows_the_positions() -> None:
    case = Case((40, 1, 300), kv_heads=2, size=64, dtype=torch.bfloat16)
    world = World(case, (38, 0, 100), "cuda")
    rows, positions = world.index(world.row_of), world.index([-1, -1, -1])
    query = world.random(3, case.heads, case.size)
    key, value = world.random(3, 2, 64), world.random(3, 2, 64)
    world.scaling = 0.1
    splits = choose_splits(3, 2, torch.cuda.get_device_properties(0).multi_processor_count)

    def step() -> torch.Tensor:
        call = world.call(query, key, value)
        return paged_decode(call, world.keys, world.values, world.tables, rows, positions, splits=splits)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for places in ([38, 0, 100], [39, -1, 101]):
        positions.copy_(world.index(places))
        for row, place in enumerate(places):
            if place >= 0:
                key[row], value[row] = world.keys_by_row[row][place], world.values_by_row[row][place]
        graph.replay()
        for row, place in enumerate(places):
            if place < 0:
                assert (out[row] == 0).all()
            else:
                exact = world.reference(row, query[row : row + 1], place)
                assert (out[row : row + 1] - exact).abs().max() <= 1e-2 * exact.abs().max()
