"""The largest numbers of short rows, as routers choose their experts: one launch, without a sort.

A program takes some rows and finds their largest numbers one after the other. Of equal numbers the first counts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST_ROW, MOST_CHOSEN = 1024, 16
"""The longest rows, and the most numbers of a row, for which this is faster than a sort."""
_TILE = 1024


def short_topk(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest numbers of each row of `values`, `[T, N]`, in descending order, and their places (int64)."""
    rows, size = values.shape
    values = values.contiguous()
    found = torch.empty(rows, count, dtype=values.dtype, device=values.device)
    places = torch.empty(rows, count, dtype=torch.int64, device=values.device)
    padded = triton.next_power_of_2(size)
    together = max(1, _TILE // padded)
    _topk_kernel[(triton.cdiv(rows, together),)](
        *(values, found, places, rows),
        SIZE=size,
        SIZE_PAD=padded,
        COUNT=count,
        ROWS=together,
    )
    return found, places


@triton.jit(do_not_specialize=["rows"])
def _topk_kernel(
    values,
    found,
    places,
    rows,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SIZE_PAD)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    left = tl.load(values + row[:, None].to(tl.int64) * SIZE + column[None, :], mask=inside, other=0.0).to(tl.float32)
    # As in torch, a number that is none is larger than all others.
    rank = tl.where(left == left, left, float("inf"))
    # Columns past the end, and those that were taken, are out: they are below minus infinity.
    out = ~inside
    for place in range(COUNT):
        highest = tl.max(tl.where(out, float("-inf"), rank), 1)
        best = tl.min(tl.where(~out & (rank == highest[:, None]), column[None, :], SIZE_PAD), 1)
        mine = column[None, :] == best[:, None]
        number = tl.sum(tl.where(mine, left, 0.0), 1)
        target = row.to(tl.int64) * COUNT + place
        tl.store(found + target, number.to(found.dtype.element_ty), mask=row < rows)
        tl.store(places + target, best.to(tl.int64), mask=row < rows)
        out = out | mine
