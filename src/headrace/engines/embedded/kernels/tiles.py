"""What the attention kernels share: tiles of keys found through a block table, and logits in base 2.

A tile never reads a slot that it was not told is visible, so whatever lies there (NaN included) reaches no result.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# A running maximum before anything was seen: finite, because the difference of two infinities is NaN.
NOTHING = tl.constexpr(-1.0e30)
UNBOUNDED = 2**30
"""The window of a layer that has none: longer than any sequence, and far from overflowing in a kernel."""
# Triton's interpreter keeps bfloat16 as bare bits and would multiply those.
_WIDEN = tl.constexpr(bool(triton.knobs.runtime.interpret))


def padded(size: int) -> int:
    """The power of two, at least 16, that holds a dimension of a matrix product."""
    return max(16, int(triton.next_power_of_2(size)))


@triton.jit
def dot(left, right, total):
    """`total + left @ right`, exact products in every dtype."""
    if _WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505 (the compiler takes one branch; after a return it would still read the other)
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def base2_logits(products, scaling, softcap, CAPPED: tl.constexpr):
    """Logits in units of log 2 (softmax is then made of exp2) from the products of queries and keys."""
    if CAPPED:
        # tanh x = 1 - 2 / (1 + exp 2x), which is right at both infinities.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(products * (scaling / softcap * 2.0 * LOG2E)))
        return tanh * (softcap * LOG2E)
    else:  # noqa: RET505
        return products * (scaling * LOG2E)


@triton.jit
def tile_blocks(table, tile, limit, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """The block ids of a tile's keys below `limit`: one id where a tile lies within a block, else one per key."""
    if BLOCK % TILE == 0:
        return tl.load(table + tile * TILE // BLOCK, mask=tile * TILE < limit, other=0)
    else:  # noqa: RET505
        positions = tile * TILE + tl.arange(0, TILE)
        return tl.load(table + positions // BLOCK, mask=positions < limit, other=0)


@triton.jit
def tile_slots(blocks, head, tile, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Where a tile's keys lie in the cache seen as one list of vectors, `[blocks * kv_heads * block_size, D]`."""
    positions = tile * TILE + tl.arange(0, TILE)
    return (blocks.to(tl.int64) * KV_HEADS + head) * BLOCK + positions % BLOCK


@triton.jit
def load_tile(cache, slots, visible, D: tl.constexpr, D_PAD: tl.constexpr):
    """The vectors in these slots, `[TILE, D_PAD]`; zeros where nothing is visible."""
    columns = tl.arange(0, D_PAD)
    # Constants throughout, so that the compiler sees rows aligned for 16-byte loads.
    addresses = cache + slots[:, None] * D + columns[None, :]
    if D == D_PAD:
        return tl.load(addresses, mask=visible[:, None], other=0.0)
    else:  # noqa: RET505
        return tl.load(addresses, mask=visible[:, None] & (columns < D)[None, :], other=0.0)
