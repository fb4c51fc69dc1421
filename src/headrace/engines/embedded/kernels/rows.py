"""The first and the last kernel of a captured step: `begin` chooses what each row computes, `advance` moves it on.

A row is idle if it is not live, or if there is no block for its next token. An idle row reads nothing, writes nothing
and stays as it is. So a row can never run past its end or past its blocks, however late the host looks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

IDLE = -1
"""The position of an idle entry, and the token that it reports."""


LEAST_SIZE = 256
"""The smallest size that is computed. A smaller batch would not be faster, and every size is compiled separately."""


@triton.jit(do_not_specialize=["count"])
def _begin(rows, token, position, capacity, live, positions, input_ids, position_ids, count, size: tl.constexpr):
    entry = tl.program_id(0) * size + tl.arange(0, size)
    inside = entry < count
    row = tl.load(rows + entry, mask=inside, other=0)
    at = tl.load(position + row, mask=inside, other=0)
    room = tl.load(capacity + row, mask=inside, other=0)
    alive = tl.load(live + row, mask=inside, other=0)
    runs = (alive != 0) & (at < room)
    tl.store(positions + entry, tl.where(runs, at, -1), mask=inside)
    tl.store(position_ids + entry, tl.where(runs, at, 0).to(tl.int64), mask=inside)
    tl.store(input_ids + entry, tl.load(token + row, mask=inside, other=0).to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _advance(
    rows,
    positions,
    drawn,
    logprobs,
    token,
    position,
    limit,
    live,
    stops,
    version,
    ring,
    cursor,
    count,
    width,
    stop_width: tl.constexpr,
    size: tl.constexpr,
):
    slot = tl.load(cursor)
    now = tl.load(version)
    record = ring + slot.to(tl.int64) * 3 * width
    entry = tl.arange(0, size)
    inside = entry < count
    row = tl.load(rows + entry, mask=inside, other=0)
    at = tl.load(positions + entry, mask=inside, other=-1)
    new = tl.load(drawn + entry, mask=inside, other=0).to(tl.int32)
    logprob = tl.load(logprobs + entry, mask=inside, other=0.0)
    runs = inside & (at >= 0)
    ends = (at + 2 >= tl.load(limit + row, mask=inside, other=0)) | (logprob != logprob)
    for k in range(stop_width):
        ends = ends | (tl.load(stops + row * stop_width + k, mask=inside, other=-1) == new)
    tl.store(token + row, new, mask=runs)
    tl.store(position + row, at + 1, mask=runs)
    tl.store(live + row, tl.where(ends, 0, 1), mask=runs)
    tl.store(record + entry, tl.where(runs, new, -1), mask=inside)
    tl.store(record + width + entry, logprob.to(tl.int32, bitcast=True), mask=inside)
    tl.store(record + 2 * width + entry, tl.where(runs, now, -1), mask=inside)
    tl.store(cursor, slot + 1)


def begin(
    rows: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    capacity: torch.Tensor,
    live: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
) -> None:
    """Fill `positions` (`IDLE` for idle entries), `input_ids` and `position_ids` for the entries in `rows`."""
    count = len(rows)
    grid = (triton.cdiv(count, 256),)
    _begin[grid](rows, token, position, capacity, live, positions, input_ids, position_ids, count, size=256)


def advance(
    rows: torch.Tensor,
    positions: torch.Tensor,
    drawn: torch.Tensor,
    logprobs: torch.Tensor,
    token: torch.Tensor,
    position: torch.Tensor,
    limit: torch.Tensor,
    live: torch.Tensor,
    stops: torch.Tensor,
    version: torch.Tensor,
    ring: torch.Tensor,
    cursor: torch.Tensor,
) -> None:
    """Give every entry that ran its drawn token, end the rows that are done, and write one slot of the ring.

    The ring is int32 `[slots, 3, width]`: token (`IDLE` for an idle entry), log-probability (as bits), version.
    """
    # A single program, because it also moves the cursor, which other programs would read.
    size = max(LEAST_SIZE, triton.next_power_of_2(len(rows)))
    _advance[(1,)](
        rows,
        positions,
        drawn,
        logprobs,
        token,
        position,
        limit,
        live,
        stops,
        version,
        ring,
        cursor,
        len(rows),
        ring.shape[2],
        stop_width=stops.shape[1],
        size=size,
    )
