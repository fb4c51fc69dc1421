"""Causal attention of chunks of new tokens over the paged cache, which already holds the chunks' own keys and values.

A token sees itself and the earlier tokens of its own row, and nothing else: no other chunk, and no slot of its last
block that is not written yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from headrace.engines.embedded.kernels.decode import choose_tile
from headrace.engines.embedded.kernels.tiles import (
    LOG2E,
    NOTHING,
    UNBOUNDED,
    base2_logits,
    dot,
    load_tile,
    padded,
    tile_blocks,
    tile_slots,
)
from headrace.models.attention import AttentionCall


def choose_queries(longest: int, size: int, itemsize: int) -> int:
    """Return how many queries a program takes, for heads of this size and chunks of at most `longest` tokens."""
    # Numbers wider than 16 bits are multiplied from registers, outside of the tensor cores: few queries at a time.
    return 16 if itemsize > 2 else 64 if longest <= 64 or size > 128 else 128


def tiles_of(counts: npt.NDArray[np.integer], queries: int) -> npt.NDArray[np.int32]:
    """Return the tiles of chunks with these numbers of tokens, `[2, n]`: the chunk, and the tile's first token in it.

    There are at most sum(counts) // queries + len(counts) tiles.
    """
    tiles = -(-counts // queries)
    chunks = np.repeat(np.arange(len(counts)), tiles)
    behind = np.arange(len(chunks)) - np.repeat(tiles.cumsum() - tiles, tiles)
    return np.stack([chunks, behind * queries]).astype(np.int32)


def paged_prefill(
    call: AttentionCall,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    tiles: torch.Tensor,
    *,
    queries: int,
    tile: int | None = None,
    num_warps: int | None = None,
    num_stages: int = 3,
) -> torch.Tensor:
    """Return the attention output, `[T, H, Dv]`, for the queries of chunks that are packed one after the other.

    Chunk c holds the tokens `offsets[c]:offsets[c + 1]`, which begin at position `starts[c]` of row `rows[c]`. `tiles`
    is the result of `tiles_of` for the same number of queries, in any order. A tile of chunk -1 is skipped. Tokens of
    no tile get zeros.
    """
    query = call.query[0].transpose(0, 1)
    tokens, heads, size = query.shape
    kv_heads, block_size, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    assert keys.is_contiguous() and values.is_contiguous() and query.stride(2) == tables.stride(1) == 1
    assert query.dtype == keys.dtype == values.dtype
    out = torch.zeros(tokens, heads, value_size, dtype=query.dtype, device=query.device)
    assert tiles.stride(1) == 1
    if tiles.shape[1] == 0:
        return out
    _prefill_kernel[(tiles.shape[1], heads)](
        *(query, keys, values, tables, rows, starts, offsets, tiles, call.sinks, out),
        *(*query.stride()[:2], tables.stride(0), tiles.stride(0)),
        call.scaling,
        UNBOUNDED if call.window is None else call.window,
        1.0 if call.softcap is None else call.softcap,
        CAPPED=call.softcap is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        D=size,
        D_PAD=padded(size),
        DV=value_size,
        DV_PAD=padded(value_size),
        BLOCK=block_size,
        QUERIES=queries,
        TILE=tile or choose_tile(max(size, value_size), keys.element_size()),
        num_warps=num_warps or (8 if queries == 128 else 4),
        num_stages=num_stages,
    )
    return out


@triton.jit
def _prefill_kernel(
    query,
    keys,
    values,
    tables,
    rows,
    starts,
    offsets,
    tiles,
    sinks,
    out,
    query_token,
    query_head,
    table_row,
    tiles_row,
    scaling,
    window,
    softcap,
    CAPPED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
):
    head, chunk = tl.program_id(1), tl.load(tiles + tl.program_id(0))
    if chunk < 0:
        return
    query_first = tl.load(tiles + tiles_row + tl.program_id(0))
    offset = tl.load(offsets + chunk)
    count = tl.load(offsets + chunk + 1) - offset
    kv_head = head // (HEADS // KV_HEADS)
    start = tl.load(starts + chunk)
    table = tables + tl.load(rows + chunk).to(tl.int64) * table_row
    indices, d, dv = query_first + tl.arange(0, QUERIES), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    tokens, places = (offset + indices).to(tl.int64), start + indices
    q_addresses = query + tokens[:, None] * query_token + head * query_head + d[None, :]
    q = tl.load(q_addresses, mask=(indices < count)[:, None] & (d < D)[None, :], other=0.0)

    # The keys that the queries of the tile see together: from the window of the first query to the last query itself.
    begin = tl.maximum(start + query_first + 1 - window, 0)
    end = start + tl.minimum(query_first + QUERIES, count)
    result = tl.zeros([QUERIES, DV_PAD], tl.float32)
    if sinks is not None:
        # The maximum must be finite, also for a sink that is switched off (minus infinity).
        sink = tl.maximum(tl.load(sinks + head).to(tl.float32) * LOG2E, NOTHING)
        highest = tl.full([QUERIES], 1.0, tl.float32) * sink
        total = tl.full([QUERIES], 1.0, tl.float32)
    else:
        highest = tl.full([QUERIES], NOTHING, tl.float32)
        total = tl.zeros([QUERIES], tl.float32)

    blocks = tile_blocks(table, begin // TILE, end, BLOCK, TILE)
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        slots = tile_slots(blocks, kv_head, tile, KV_HEADS, BLOCK, TILE)
        # Loaded one tile ahead, so that no tile waits for its own addresses.
        blocks = tile_blocks(table, tile + 1, end, BLOCK, TILE)
        spots = tile * TILE + tl.arange(0, TILE)
        written = (spots >= begin) & (spots < end)
        k = load_tile(keys, slots, written, D, D_PAD)
        scores = dot(q, tl.trans(k), tl.zeros([QUERIES, TILE], tl.float32))
        behind = places[:, None] - spots[None, :]
        visible = (behind >= 0) & (behind < window)
        scores = tl.where(visible, base2_logits(scores, scaling, softcap, CAPPED), float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - raised[:, None]), tl.exp2(highest - raised)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(values, slots, written, DV, DV_PAD)
        result = dot(weights.to(v.dtype), v, result * shrink[:, None])
        highest = raised

    # Queries past the end of the chunk may have seen no key. They are not stored.
    result = result / tl.where(indices < count, total, 1.0)[:, None]
    out_addresses = out + (tokens[:, None] * HEADS + head) * DV + dv[None, :]
    tl.store(out_addresses, result.to(out.dtype.element_ty), mask=(indices < count)[:, None] & (dv < DV)[None, :])
