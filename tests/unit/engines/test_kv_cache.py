from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.embedded.kv_cache import BlockPool, Chain
from headrace.engines.embedded.runner import KVCache

OPERATIONS = st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 20)), max_size=60)


@given(OPERATIONS)
def test_a_block_is_free_exactly_when_nobody_holds_it(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8, 4)
    held: list[list[int]] = []
    for kind, n in operations:
        if kind == "take":
            count = n % 4
            if count <= pool.free:
                held.append(pool.take(count))
            else:
                with pytest.raises(RuntimeError, match="wanted"):
                    pool.take(count)
        elif held and kind == "share":
            blocks = held[n % len(held)]
            pool.share(blocks)
            held.append(list(blocks))
        elif held:
            pool.release(held.pop(n % len(held)))
        references = Counter(block for blocks in held for block in blocks)
        assert pool.free == 8 - len(references)
    for blocks in held:
        pool.release(blocks)
    assert sorted(pool.take(8)) == list(range(8))


def test_a_free_block_is_neither_shared_nor_freed_again() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="already free"):
        pool.release(blocks)
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share(blocks)


def offer(pool: BlockPool, block: int) -> None:
    """Make the block findable as the beginning of a list of tokens that is its own."""
    pool.offer(Chain(0, 4).keys([block] * 5, 1)[0], block)


def findable(pool: BlockPool) -> set[int]:
    return {block for block in range(pool.total) if pool.find(Chain(0, 4), [block] * 5) == [block]}


def test_findable_blocks_are_reused_last_and_the_longest_free_first() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.take(3)
    for block in blocks:
        offer(pool, block)
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])
    assert pool.free == 4 and not any(pool.references(block) for block in blocks)
    pool.share([blocks[1]])
    pool.release([blocks[1]])
    assert set(pool.take(1)).isdisjoint(blocks) and findable(pool) == set(blocks)
    assert pool.take(2) == [blocks[0], blocks[2]] and findable(pool) == {blocks[1]}
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 free"):
        pool.take(2)
    assert pool.take(1) == [blocks[1]] and findable(pool) == set()


def test_a_forgotten_block_is_an_ordinary_one() -> None:
    pool = BlockPool(2, 4)
    held, idle = pool.take(2)
    for block in (held, idle):
        offer(pool, block)
    pool.release([idle])
    pool.forget([held, idle])
    assert findable(pool) == set()
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share([idle])
    with pytest.raises(RuntimeError, match="cannot be offered"):
        offer(pool, idle)
    pool.release([held])
    assert pool.free == 2 and pool.references(held) == 0


@given(tokens=st.integers(0, 200), size=st.integers(1, 33))
def test_blocks_for_is_the_smallest_number_that_holds(tokens: int, size: int) -> None:
    blocks = BlockPool(1, size).blocks_for(tokens)
    assert blocks * size >= tokens > (blocks - 1) * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_is_read_back_in_block_order(dtype: torch.dtype) -> None:
    cache = KVCache(blocks=6, block_size=2)
    key = torch.arange(5 * 3 * 4).view(5, 3, 4).to(dtype)
    value = -torch.arange(5 * 3 * 7).view(5, 3, 7).to(dtype)
    # Tokens 0..4 of a sequence in blocks 4, 1, 5.
    cache.write(3, torch.tensor([8, 9, 2, 3, 10]), key, value)
    keys, values = cache.read(3, torch.tensor([4, 1, 5]), 1)
    assert torch.equal(keys[0, :5], key) and torch.equal(values[0, :5], value)
    assert not keys[0, 5].any(), "slots that were never written are zero: they are read as padding"
    keys, _ = cache.read(3, torch.tensor([1, 4]), 2)
    assert torch.equal(keys, torch.stack([key[2:4], key[0:2]]))


def test_copies_read_all_sources_first() -> None:
    cache = KVCache(blocks=3, block_size=1)
    rows = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    for layer in (0, 1):
        cache.write(layer, torch.arange(3), rows + layer, rows + layer)
    cache.copy([(0, 1), (1, 2)])
    for layer in (0, 1):
        keys, values = cache.read(layer, torch.arange(3), 1)
        assert keys.flatten().tolist() == values.flatten().tolist() == [1 + layer, 1 + layer, 2 + layer]
