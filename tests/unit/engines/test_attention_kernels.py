from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_cases import Case, World, check_decode, check_prefill, heads_first, with_options
from headrace.engines.embedded.device.state import DeviceCache
from headrace.engines.embedded.kernels.attention import MAX_SPLITS, choose_splits, choose_tile, paged_decode
from headrace.engines.embedded.kernels.cache import write_cache
from headrace.models.fp8 import FP8

# Small on purpose: the interpreter takes milliseconds for every tile of every program.
BASE = Case((1, 0, 50, 17), kv_heads=1)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("case", with_options(BASE), ids=str)
def test_decode_equals_float64(case: Case, splits: int) -> None:
    check_decode(case, splits=splits, tile=16)


@pytest.mark.parametrize("splits", [2, 3, 8])
def test_rows_shorter_than_the_splits_leave_no_trace_of_the_idle_ones(splits: int) -> None:
    check_decode(replace(BASE, sinks=True, window=33), splits=splits, tile=16)


@pytest.mark.parametrize(("block_size", "tile"), [(8, 16), (8, 32), (16, 64), (24, 16), (24, 32), (32, 16), (32, 32)])
def test_keys_are_found_in_blocks_of_any_size(block_size: int, tile: int) -> None:
    check_decode(replace(BASE, block_size=block_size), splits=2, tile=tile)
    check_prefill(Case((45, 20), block_size=block_size, kv_heads=1), (18, 20), queries=32, tile=tile)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 17), (2, 8), (3, 1), (3, 3), (2, 4)])
def test_each_query_head_gets_its_key_head(kv_heads: int, group: int) -> None:
    case = Case((19, 5), kv_heads=kv_heads, group=group, sinks=True)
    check_decode(case, splits=2, tile=16)
    check_prefill(replace(case, lengths=(5,)), (3,), queries=16, tile=16)


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (80, 80), (96, 64), (24, 40), (128, 128)])
def test_heads_of_any_size_are_padded_without_a_trace(size: int, value_size: int) -> None:
    case = replace(BASE, size=size, value_size=value_size, lengths=(40, 1, 18))
    check_decode(case, splits=1)
    check_decode(case, splits=2, tile=16)
    check_prefill(case, (20, 1, 18), queries=32, tile=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_it_can_be(dtype: torch.dtype) -> None:
    case = replace(BASE, dtype=dtype, size=64, sinks=True)
    check_decode(case, splits=1)
    check_decode(case, splits=2, tile=16)
    check_prefill(case, (1, 0, 30, 17), queries=32, tile=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_in_fp8_holds_rounded_keys_and_values(dtype: torch.dtype) -> None:
    case = replace(BASE, dtype=dtype, stored=FP8, size=32, sinks=True)
    check_decode(case, splits=1)
    check_decode(case, splits=2, tile=16)
    check_prefill(case, (1, 0, 30, 17), queries=32, tile=32)


def test_keys_beyond_the_range_of_fp8_become_its_largest_number() -> None:
    key = torch.tensor([[[500.0, -1e6, 448.0, 0.25] + [0.0] * 12]])
    keys, values = (torch.zeros(2, 1, 16, 16).to(FP8) for _ in range(2))
    write_cache(key, -key, keys, values, torch.tensor([19]))
    assert keys[1, 0, 3, :4].float().tolist() == [448.0, -448.0, 448.0, 0.25]
    assert torch.equal(values.float(), -keys.float()) and not keys[0].float().any()


def test_blocks_of_an_fp8_cache_are_copied() -> None:
    cache = DeviceCache([(1, 4, 4)], 3, 2, FP8, torch.device("cpu"))
    cache.layers[0][0].copy_(torch.arange(24.0).view(3, 1, 2, 4))
    cache.copy(torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert cache.layers[0][0].float().flatten().tolist() == [*range(8), *range(8), 8, 9, 10, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("splits", [1, 3])
def test_logits_too_large_for_exp_do_not_overflow(splits: int) -> None:
    world = World(Case((40,), kv_heads=1, group=1), (39,), "cpu")
    query, new = torch.full((1, 1, 16), 100.0), torch.full((1, 1, 16), -1.0)
    world.keys.mul_(100.0)
    world.scaling = 1.0
    cache = (world.keys, world.values, world.tables, world.index(world.row_of))
    found = paged_decode(world.call(query, new, new), *cache, world.index([39]), splits=splits, tile=16)
    best = world.keys_by_row[0][:39, 0].sum(-1).argmax()
    torch.testing.assert_close(found[0, 0], world.values_by_row[0][best, 0])


@pytest.mark.parametrize("case", with_options(Case((50, 33, 1), kv_heads=1)), ids=str)
def test_prefill_equals_float64(case: Case) -> None:
    check_prefill(case, (50, 9, 1), queries=16, tile=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_as_the_engine_calls_it(dtype: torch.dtype) -> None:
    check_prefill(Case((100, 3), dtype=dtype, size=32, kv_heads=1, window=50), (80, 2))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_write_touches_its_slots_alone(index: torch.dtype) -> None:
    keys, values = torch.randn(5, 3, 8, 24), torch.randn(5, 3, 8, 10)
    key, value = heads_first(torch.randn(4, 3, 24)), torch.randn(4, 3, 10)
    keys_after, values_after = keys.clone(), values.clone()
    for token, block, at in ((0, 4, 7), (2, 0, 0), (3, 2, 5)):
        keys_after[block, :, at], values_after[block, :, at] = key[token], value[token]
    write_cache(key, value, keys, values, torch.tensor([4 * 8 + 7, -1, 0, 2 * 8 + 5], dtype=index))
    assert torch.equal(keys, keys_after) and torch.equal(values, values_after)


def test_copies_read_before_they_write() -> None:
    cache = DeviceCache([(2, 4, 4)] * 2, 4, 8, torch.float32, torch.device("cpu"))
    stores = [store.copy_(torch.randn(4, 2, 8, 4)) for stores in cache.layers for store in stores]
    before = [store.clone() for store in stores]
    cache.copy(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1, 3], dtype=torch.int32))
    for store, old in zip(stores, before, strict=True):
        assert torch.equal(store, old[[0, 0, 2, 1]])


@given(st.integers(1, 2048), st.integers(1, 64), st.integers(1, 200))
def test_splits_fill_the_processors_twice_and_no_more(batch: int, kv_heads: int, processors: int) -> None:
    splits = choose_splits(batch, kv_heads, processors)
    assert splits in (1, 2, 4, 8, 16, 32)
    assert splits == MAX_SPLITS or batch * kv_heads * splits >= 2 * processors
    assert splits == 1 or batch * kv_heads * splits < 4 * processors


def test_splits_and_tiles_of_known_shapes() -> None:
    assert choose_splits(256, 8, 132) == 1
    assert choose_splits(8, 8, 132) == 8
    assert choose_splits(1, 1, 132) == 32
    assert [choose_tile(d, 2) for d in (64, 80, 128, 256)] == [64, 64, 64, 32]
    assert choose_tile(128, 4) == 32
