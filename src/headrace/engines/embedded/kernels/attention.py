"""Attention over the paged cache: of one new token per row, and of chunks of new tokens.

The decode kernel also stores the key and value of its token. No program reads the slot that is being written: the
program that writes it attends to the new token from registers, and all others read only earlier positions. The keys and
values of a chunk are in the cache before it attends. A token sees itself and the earlier tokens of its own row, and
nothing else. A tile reads only slots that are marked visible, so the content of other slots, even NaN, never reaches a
result. Nothing is read back to the host, so a launch may be captured in a CUDA graph.

The cache may be in FP8. Keys and values are then rounded when they are stored, that of the new token too before it is
attended to, and multiplied in the dtype of the queries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from headrace.engines.embedded.kernels.cache import as_stored
from headrace.models.attention import AttentionCall
from headrace.models.fp8 import FP8

MAX_SPLITS = 32
_TILE_BYTES = 16384
LOG2E = tl.constexpr(1.4426950408889634)
# The initial value of a running maximum. It is finite, because the difference of two infinities is NaN.
NOTHING = tl.constexpr(-1.0e30)
UNBOUNDED = 2**30
"""The window of a layer without a window: longer than any sequence, and too small to overflow in a kernel."""
# Triton's interpreter stores bfloat16 as raw bits and would multiply these bits.
_WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


def padded(size: int) -> int:
    """Return the smallest power of two, at least 16, that holds a dimension of a matrix product."""
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit
def dot(left, right, total):
    """Return `total + left @ right`, with exact products in every dtype."""
    if _WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505 (the compiler takes one branch; after a return it would still read the other)
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def base2_logits(products, scaling, softcap, CAPPED: tl.constexpr):
    """Return logits in units of log 2, so that softmax can use exp2, from the products of queries and keys."""
    if CAPPED:
        # tanh x = 1 - 2 / (1 + exp 2x), which is right at both infinities.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scaling / softcap * 2.0 * LOG2E)))
        return tanh * (softcap * LOG2E)
    else:  # noqa: RET505
        return products * (scaling * LOG2E)


@triton.jit
def tile_blocks(table, tile, limit, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the block ids of a tile's keys below `limit`: one id if a tile lies within one block, else one per key."""
    if BLOCK % TILE == 0:
        return tl.load(table + tile * TILE // BLOCK, mask=tile * TILE < limit, other=0)
    else:  # noqa: RET505
        positions = tile * TILE + tl.arange(0, TILE)
        return tl.load(table + positions // BLOCK, mask=positions < limit, other=0)


@triton.jit
def tile_slots(blocks, head, tile, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the indices of a tile's keys in the cache, seen as vectors `[blocks * kv_heads * block_size, D]`."""
    positions = tile * TILE + tl.arange(0, TILE)
    return (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK + positions % BLOCK


@triton.jit
def load_tile(cache, slots, visible, D: tl.constexpr, D_PAD: tl.constexpr):
    """Return the vectors in these slots, `[TILE, D_PAD]`, with zeros for slots that are not visible."""
    columns = tl.arange(0, D_PAD)
    # All strides are constants, so that the compiler sees that rows are aligned for 16-byte loads.
    addresses = cache + slots[:, None] * D + columns[None, :]
    if D == D_PAD:
        return tl.load(addresses, mask=visible[:, None], other=0.0)
    else:  # noqa: RET505
        return tl.load(addresses, mask=visible[:, None] & (columns < D)[None, :], other=0.0)


def choose_splits(batch: int, kv_heads: int, processors: int) -> int:
    """Return the number of programs that share the keys of a row: a power of two with 2 to 4 programs per processor."""
    splits = 1
    while splits < MAX_SPLITS and batch * kv_heads * splits < 2 * processors:
        splits *= 2
    return splits


def choose_tile(size: int, itemsize: int) -> int:
    """Return how many keys of this size a program reads at once: many bytes in flight, but room for three stages."""
    return min(64, max(16, _TILE_BYTES // (padded(size) * itemsize)))


def paged_decode(
    call: AttentionCall,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    splits: int = 1,
    tile: int | None = None,
) -> torch.Tensor:
    """Return the attention output, `[B, H, Dv]`, of the new token of each row, and store its key and value.

    Token i of the call is the new token of entry i, at `positions[i]` of row `rows[i]`. The last stride of its query,
    key and value must be 1. `keys` and `values` are `[blocks, Hk, block_size, D]` and change only in the slots of the
    new tokens. An entry whose position is negative is idle: it writes nothing to the cache and its output is zero.
    """
    query, key, value = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    tile = tile or choose_tile(max(keys.shape[3], values.shape[3]), keys.element_size())
    window = UNBOUNDED if call.window is None else call.window
    batch, heads, size = query.shape
    kv_heads, block_size, value_size = keys.shape[1], keys.shape[2], values.shape[3]
    assert keys.is_contiguous() and values.is_contiguous() and tables.stride(1) == 1
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert query.dtype == key.dtype == value.dtype
    assert keys.dtype == values.dtype and keys.dtype in (query.dtype, FP8)
    out = torch.empty(batch, heads, value_size, dtype=query.dtype, device=query.device)
    partials = stats = None
    if splits > 1:
        partials = torch.empty(batch, heads, splits, value_size, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, batch, heads, splits, dtype=torch.float32, device=query.device)
    _decode_kernel[(kv_heads, batch, splits)](
        *(query, key, value, keys, values, tables, rows, positions, call.sinks, out, partials, stats),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], tables.stride(0)),
        call.scaling,
        window,
        1.0 if call.softcap is None else call.softcap,
        CAPPED=call.softcap is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PAD=padded(heads // kv_heads),
        D=size,
        D_PAD=padded(size),
        DV=value_size,
        DV_PAD=padded(value_size),
        BLOCK=block_size,
        TILE=tile,
        SPLITS=splits,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _combine_kernel[(heads, batch)](
            *(partials, stats, positions, out, window),
            HEADS=heads,
            DV=value_size,
            DV_PAD=padded(value_size),
            TILE=tile,
            SPLITS=splits,
            SPLITS_PAD=triton.next_power_of_2(splits),
            num_warps=2,
        )
    return out


@triton.jit
def _visible_tiles(position, window, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """Return the first cached key that a token sees, its tile, the number of tiles, and how many splits share them."""
    start = tl.maximum(position + 1 - window, 0)
    first = start // TILE
    tiles = (position + TILE - 1) // TILE - first
    # A split without a tile would have no result to combine. So there are at most as many splits as tiles, and at
    # least one.
    return start, first, tiles, tl.maximum(tl.minimum(tiles, SPLITS), 1)


@triton.jit
def _decode_kernel(
    query,
    key,
    value,
    keys,
    values,
    tables,
    rows,
    positions,
    sinks,
    out,
    partials,
    stats,
    query_entry,
    query_head,
    key_entry,
    key_head,
    value_entry,
    value_head,
    table_row,
    scaling,
    window,
    softcap,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # Heads vary fastest, so that programs that run together read neighbouring memory of a block.
    head, entry, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    position, row = tl.load(positions + entry), tl.load(rows + entry)
    group, d, dv = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    mine = group < GROUP
    out_row = (entry * KV_HEADS + head) * GROUP + group
    out_mask = mine[:, None] & (dv < DV)[None, :]
    if position < 0:
        if SPLITS == 1:
            nothing = tl.zeros([GROUP_PAD, DV_PAD], out.dtype.element_ty)
            tl.store(out + out_row[:, None] * DV + dv[None, :], nothing, out_mask)
        return
    start, first, tiles, used = _visible_tiles(position, window, TILE, SPLITS)
    if split >= used:
        return
    begin, end = first + tiles * split // used, first + tiles * (split + 1) // used
    # The last split owns the new token. Its loads are issued here and used only after the loop, which hides their
    # latency.
    owner = split == used - 1
    table = tables + row.to(tl.int64) * table_row
    blocks = tile_blocks(table, begin, position, BLOCK, TILE)
    q_addresses = query + entry * query_entry + (head * GROUP + group)[:, None] * query_head + d[None, :]
    q = tl.load(q_addresses, mask=mine[:, None] & (d < D)[None, :], other=0.0)
    new_key = tl.load(key + entry * key_entry + head * key_head + d, mask=owner & (d < D), other=0.0)
    new_value = tl.load(value + entry * value_entry + head * value_head + dv, mask=owner & (dv < DV), other=0.0)
    new_block = tl.load(table + position // BLOCK, mask=owner, other=0)

    highest = tl.full([GROUP_PAD], NOTHING, tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    result = tl.zeros([GROUP_PAD, DV_PAD], tl.float32)
    for tile in range(begin, end):
        slots = tile_slots(blocks, head, tile, KV_HEADS, BLOCK, TILE)
        # Loaded one tile ahead, so that no tile waits for its own addresses.
        blocks = tile_blocks(table, tile + 1, position, BLOCK, TILE)
        spots = tile * TILE + tl.arange(0, TILE)
        visible = (spots >= start) & (spots < position)
        k = load_tile(keys, slots, visible, D, D_PAD).to(q.dtype)
        scores = dot(q, tl.trans(k), tl.zeros([GROUP_PAD, TILE], tl.float32))
        scores = tl.where(visible[None, :], base2_logits(scores, scaling, softcap, CAPPED), float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - raised[:, None]), tl.exp2(highest - raised)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(values, slots, visible, DV, DV_PAD).to(q.dtype)
        result = dot(weights.to(v.dtype), v, result * shrink[:, None])
        highest = raised

    # The owner stores the new token, attends to it, and adds the sink, once per query.
    new_slot = (new_block.to(tl.int64) * KV_HEADS + head) * BLOCK + position % BLOCK
    new_key, new_value = as_stored(new_key, keys), as_stored(new_value, values)
    tl.store(keys + new_slot * D + d, new_key, mask=owner & (d < D))
    tl.store(values + new_slot * DV + dv, new_value, mask=owner & (dv < DV))
    products = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
    logits = tl.where(owner, base2_logits(products, scaling, softcap, CAPPED), NOTHING)
    raised = tl.maximum(highest, logits)
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + group, mask=owner & mine, other=0.0).to(tl.float32) * LOG2E
        sink = tl.where(owner, sink, NOTHING)
        raised = tl.maximum(raised, sink)
    weight, shrink = tl.where(owner, tl.exp2(logits - raised), 0.0), tl.exp2(highest - raised)
    total = total * shrink + weight
    if sinks is not None:
        total += tl.where(owner, tl.exp2(sink - raised), 0.0)
    result = result * shrink[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]

    if SPLITS == 1:
        result = result / total[:, None]
        tl.store(out + out_row[:, None] * DV + dv[None, :], result.to(out.dtype.element_ty), out_mask)
    else:
        part = out_row * SPLITS + split
        tl.store(partials + part[:, None] * DV + dv[None, :], result, out_mask)
        tl.store(stats + part, raised, mine)
        tl.store(stats + tl.num_programs(1).to(tl.int64) * (KV_HEADS * GROUP * SPLITS) + part, total, mine)


@triton.jit
def _combine_kernel(
    partials,
    stats,
    positions,
    out,
    window,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
):
    head, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(positions + entry)
    _, _, _, used = _visible_tiles(position, window, TILE, SPLITS)
    split, dv = tl.arange(0, SPLITS_PAD), tl.arange(0, DV_PAD)
    # Splits that took no part (all splits of an idle entry) did not write their scratch memory.
    took_part = (split < used) & (position >= 0)
    part = (entry * HEADS + head) * SPLITS + split
    highest = tl.load(stats + part, mask=took_part, other=NOTHING)
    total = tl.load(stats + tl.num_programs(1).to(tl.int64) * (HEADS * SPLITS) + part, mask=took_part, other=0.0)
    mask = took_part[:, None] & (dv < DV)[None, :]
    results = tl.load(partials + part[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    weight = tl.exp2(highest - tl.max(highest, 0))
    total = tl.sum(weight * total, 0)
    result = tl.sum(weight[:, None] * results, 0) / tl.where(position >= 0, total, 1.0)
    tl.store(out + (entry * HEADS + head) * DV + dv, result.to(out.dtype.element_ty), mask=dv < DV)


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
    assert keys.dtype == values.dtype and keys.dtype in (query.dtype, FP8)
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
        k = load_tile(keys, slots, written, D, D_PAD).to(q.dtype)
        scores = dot(q, tl.trans(k), tl.zeros([QUERIES, TILE], tl.float32))
        behind = places[:, None] - spots[None, :]
        visible = (behind >= 0) & (behind < window)
        scores = tl.where(visible, base2_logits(scores, scaling, softcap, CAPPED), float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - raised[:, None]), tl.exp2(highest - raised)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(values, slots, written, DV, DV_PAD).to(q.dtype)
        result = dot(weights.to(v.dtype), v, result * shrink[:, None])
        highest = raised

    # Queries past the end of the chunk may have seen no key. They are not stored.
    result = result / tl.where(indices < count, total, 1.0)[:, None]
    out_addresses = out + (tokens[:, None] * HEADS + head) * DV + dv[None, :]
    tl.store(out_addresses, result.to(out.dtype.element_ty), mask=(indices < count)[:, None] & (dv < DV)[None, :])
