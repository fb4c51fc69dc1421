"""Writes to the paged cache, `[blocks, kv_heads, block_size, D]`, outside decode: whole chunks, and copies of blocks.

A write touches the slots it is given and no other; nothing is read back, so it may be captured in a CUDA graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the keys and values (`[T, kv_heads, D]`) of T tokens; a slot is block * block_size + offset.

    A token whose slot is negative is skipped. No two tokens may have the same slot.
    """
    assert keys.is_contiguous() and values.is_contiguous()
    for new, store in ((key, keys), (value, values)):
        assert new.stride(2) == 1 and new.dtype == store.dtype
        tokens, kv_heads, size = new.shape
        if tokens == 0:
            return
        _write_kernel[(tokens,)](
            *(new, store, slots, *new.stride()[:2]),
            KV_HEADS=kv_heads,
            HEADS_PAD=triton.next_power_of_2(kv_heads),
            D=size,
            D_PAD=triton.next_power_of_2(size),
            BLOCK=store.shape[2],
            num_warps=4,
        )


def copy_blocks(keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy whole blocks; every source is read before any target is written."""
    for store in (keys, values):
        store.index_copy_(0, targets.long(), store.index_select(0, sources))


@triton.jit
def _write_kernel(
    new,
    store,
    slots,
    new_token,
    new_head,
    KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    heads, d = tl.arange(0, HEADS_PAD), tl.arange(0, D_PAD)
    mask = (heads < KV_HEADS)[:, None] & (d < D)[None, :]
    data = tl.load(new + token * new_token + heads[:, None] * new_head + d[None, :], mask=mask)
    vectors = (slot // BLOCK * KV_HEADS + heads) * BLOCK + slot % BLOCK
    tl.store(store + vectors[:, None] * D + d[None, :], data, mask=mask)
