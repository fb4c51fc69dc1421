"""The prefix cache against a plain search over everything that was offered."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.embedded.kv_cache import BlockPool, Chain

SIZE = 2
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=9)


def blocks_of(pool: BlockPool, tokens: list[int], version: int) -> list[int]:
    """Compute tokens into blocks of their own, and offer the full ones."""
    full = len(tokens) // SIZE
    blocks = pool.take(full)
    for key, block in zip(Chain(version, SIZE).keys(tokens, full), blocks, strict=True):
        pool.offer(key, block)
    return blocks


@settings(deadline=None)
@given(st.lists(st.tuples(TOKENS, st.integers(0, 1)), max_size=8), TOKENS, st.integers(0, 1))
def test_the_longest_known_beginning_is_found_and_never_all(
    known: list[tuple[list[int], int]], tokens: list[int], version: int
) -> None:
    pool = BlockPool(64, SIZE)
    held: dict[int, tuple[int, list[int]]] = {}
    for other, under in known:
        for i, block in enumerate(blocks_of(pool, other, under)):
            held[block] = (under, other[: (i + 1) * SIZE])
    found = pool.find(Chain(version, SIZE), tokens)
    for i, block in enumerate(found):
        assert held[block] == (version, tokens[: (i + 1) * SIZE])
    prefixes = [tokens[:n] for n in range(SIZE, len(tokens), SIZE)]
    expected = sum(any(v == version and o[: len(p)] == p for o, v in known) for p in prefixes)
    assert len(found) == expected


@given(TOKENS, TOKENS, st.integers(0, 1), st.integers(0, 1), st.integers(0, 4))
def test_keys_differ_exactly_where_tokens_or_versions_do(a: list[int], b: list[int], u: int, v: int, cut: int) -> None:
    chain = Chain(u, SIZE)
    # The keys do not depend on how the list grew.
    chain.keys(a[:SIZE], len(a[:SIZE]) // SIZE)
    ours, theirs = chain.keys(a, len(a) // SIZE), Chain(v, SIZE).keys(b, len(b) // SIZE)
    for i, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        assert (one == other) == (u == v and a[: (i + 1) * SIZE] == b[: (i + 1) * SIZE])
    assert len(set(ours)) == len(ours)
    assert chain.fork(cut).keys(a, len(a) // SIZE) == ours


def test_a_block_is_found_until_the_pool_needs_it_its_end_first() -> None:
    pool = BlockPool(4, SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    blocks = blocks_of(pool, tokens, 0)
    pool.release(reversed(blocks))
    assert pool.find(Chain(0, SIZE), tokens) == blocks and pool.free == 4
    pool.take(2)
    assert pool.find(Chain(0, SIZE), tokens) == blocks[:2]
    pool.share(blocks[:1])
    pool.take(1)
    assert pool.find(Chain(0, SIZE), tokens) == blocks[:1] and pool.free == 0


def test_the_first_block_with_a_key_is_the_one_that_is_found() -> None:
    pool = BlockPool(8, SIZE)
    first = blocks_of(pool, [1, 2, 3, 4, 5], 0)
    second = blocks_of(pool, [1, 2, 3, 4, 6, 7, 8], 0)
    assert pool.find(Chain(0, SIZE), [1, 2, 3, 4, 6, 7, 8]) == [*first, second[2]]
    pool.release(second)
    assert pool.take(6)[-1] == second[2], "only what is found is remembered"
    pool.forget(first[:1])
    assert pool.find(Chain(0, SIZE), [1, 2, 3, 4, 5]) == []
    second_tokens = [1, 2, 3, 4, 6, 7, 8]
    pool.offer(Chain(0, SIZE).keys(second_tokens, 1)[0], first[0])
    assert pool.find(Chain(0, SIZE), second_tokens) == first
    pool.forget()
    assert pool.find(Chain(0, SIZE), second_tokens) == []
