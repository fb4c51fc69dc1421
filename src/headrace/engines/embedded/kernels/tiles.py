"""The common parts of the attention kernels: tiles of keys that are found through a block table, and logits in base 2.

A tile reads only slots that are marked visible. So the content of other slots, even NaN, never reaches a result.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
