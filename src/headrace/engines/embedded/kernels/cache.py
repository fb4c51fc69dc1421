"""Writes to the paged cache, `[blocks, kv_heads, block_size, D]`, outside of decode.

A write touches only the slots that it is given. Nothing is read back to the host, so a write may be captured in a CUDA
graph. A slot is block * block_size + offset. A cache in FP8 holds keys and values rounded, without a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.models.fp8 import FP8


@triton.jit
def as_stored(numbers, store):
    """Return the numbers in the dtype of the cache. Numbers beyond the range of FP8 become its largest."""
    if store.dtype.element_ty == tl.float8e4nv:
        wide = numbers.to(tl.float32)
        return tl.minimum(tl.maximum(wide, -448.0), 448.0).to(tl.float8e4nv)
    else:  # noqa: RET505 (the compiler takes one branch)
        return numbers


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store the keys and values (`[T, kv_heads, D]`) of T tokens, each in its own slot. A negative slot is skipped."""
    assert keys.is_contiguous() and values.is_contiguous()
    for new, store in ((key, keys), (value, values)):
        assert new.stride(2) == 1 and store.dtype in (new.dtype, FP8)
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


def find_places(
    owners: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    offsets: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Fill in the positions and slots of packed tokens. Token t belongs to chunk `owners[t]`.

    The tokens of chunk c begin at index `offsets[c]`, and at position `starts[c]` of row `rows[c]`. A token of no chunk
    (-1) gets position 0 and slot -1.
    """
    tokens = len(owners)
    _places_kernel[(triton.cdiv(tokens, _TOKENS),)](
        *(owners, rows, starts, offsets, tables, positions, slots, tokens, tables.stride(0)),
        BLOCK=block_size,
        SIZE=_TOKENS,
    )


_TOKENS = 256


@triton.jit(do_not_specialize=["count"])
def _places_kernel(
    owners, rows, starts, offsets, tables, positions, slots, count, table_row, BLOCK: tl.constexpr, SIZE: tl.constexpr
):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = token < count
    chunk = tl.load(owners + token, mask=inside, other=-1)
    owned = chunk >= 0
    behind = token - tl.load(offsets + chunk, mask=owned, other=0)
    position = tl.load(starts + chunk, mask=owned, other=0) + behind
    row = tl.load(rows + chunk, mask=owned, other=0).to(tl.int64)
    block = tl.load(tables + row * table_row + position // BLOCK, mask=owned, other=0)
    tl.store(positions + token, tl.where(owned, position, 0).to(positions.dtype.element_ty), mask=inside)
    slot = block.to(slots.dtype.element_ty) * BLOCK + position % BLOCK
    tl.store(slots + token, tl.where(owned, slot, -1), mask=inside)


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
    tl.store(store + vectors[:, None] * D + d[None, :], as_stored(data, store), mask=mask)
