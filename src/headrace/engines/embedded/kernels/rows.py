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
STOPS = 16
"""The number of stop tokens per row that the device knows. The host checks all stop tokens, and its result counts."""


class RowBuffers:
    """The buffers of all rows, at fixed addresses, with one entry per row and one for a spare row."""

    def __init__(self, rows: int, ring_slots: int, device: torch.device) -> None:
        self.rows = rows
        self.spare = rows
        self.device = device
        self.token = self._ints(rows + 1)
        """The last token of the row, which the next step computes."""
        self.position = self._ints(rows + 1)
        """The position of that token in the sequence."""
        self.limit = self._ints(rows + 1)
        """The largest number of tokens that the sequence may have."""
        self.capacity = self._ints(rows + 1)
        """The number of tokens that fit into the row's blocks."""
        self.live = self._ints(rows + 1)
        self.stops = self._ints(rows + 1, STOPS, fill=-1)
        self.version = self._ints(1, fill=-1)
        self.ring = self._ints(ring_slots, 3, rows)
        """For each step: the token (`IDLE` for an idle entry), its log-probability (as bits), and its version."""
        self.cursor = self._ints(1)
        """The slot of the ring that the next step writes."""

    def _ints(self, *shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=self.device)


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
    state: RowBuffers,
    entries: torch.Tensor,
    positions: torch.Tensor,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
) -> None:
    """Fill `positions` (`IDLE` for idle entries), `input_ids` and `position_ids` for the rows in `entries`."""
    _begin[(triton.cdiv(len(entries), 256),)](
        *(entries, state.token, state.position, state.capacity, state.live, positions, input_ids, position_ids),
        len(entries),
        size=256,
    )


def advance(
    state: RowBuffers, entries: torch.Tensor, positions: torch.Tensor, drawn: torch.Tensor, logprobs: torch.Tensor
) -> None:
    """Give every entry that ran its drawn token, end the rows that are done, and write one slot of the ring."""
    # A single program, because it also moves the cursor, which other programs would read.
    _advance[(1,)](
        *(entries, positions, drawn, logprobs, state.token, state.position, state.limit, state.live, state.stops),
        *(state.version, state.ring, state.cursor, len(entries), state.ring.shape[2]),
        stop_width=state.stops.shape[1],
        size=max(LEAST_SIZE, triton.next_power_of_2(len(entries))),
    )
