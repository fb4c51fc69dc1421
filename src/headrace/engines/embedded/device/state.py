"""The state of every row on the device, and the changes to it that the host enqueues between two launches.

The last row is a spare that is never live: entries that only fill a batch up to its bucket point at the spare row. All
changes go through the engine's stream, so a launch that is in flight never sees them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from headrace.engines.embedded.kernels.rows import STOPS, RowBuffers
from headrace.engines.embedded.kernels.sampling import SamplingRows
from headrace.engines.embedded.sequence import Sequence
from headrace.engines.embedded.transfer import Uploads


class DeviceState(RowBuffers):
    """The buffers of all rows, and what the host knows of them."""

    def __init__(self, rows: int, table_width: int, ring_slots: int, device: torch.device) -> None:
        super().__init__(rows, ring_slots, device)
        self.tables = self._ints(rows + 1, table_width)
        self.sampling = SamplingRows(rows + 1, device)
        self.entries = self._ints(rows, fill=self.spare)
        """The rows of the current batch."""
        # The host's copy of `entries`, as the device has them.
        self._chosen: list[int | None] = []
        self._free = list(range(rows - 1, -1, -1))
        # The number of blocks of each row that are in the tables.
        self._known = [0] * rows
        self.upload = Uploads(device).send

    def take(self) -> int:
        """Take a free row."""
        return self._free.pop()

    def release(self, row: int) -> None:
        """Free a row. Launches in flight may still use it, and they are done before the row is set again."""
        self._free.append(row)

    def set_rows(self, sequences: Seq[Sequence], block_size: int, live: Seq[bool]) -> None:
        """Write all fields of the rows of these sequences. Live rows decode from their last token."""
        fields = np.array(
            [
                (s.tokens[-1], len(s.tokens) - 1, s.limit, len(s.blocks) * block_size, alive)
                for s, alive in zip(sequences, live, strict=True)
            ],
            np.int32,
        )
        stops = np.full((len(sequences), STOPS), -1, np.int32)
        tables = np.zeros((len(sequences), self.tables.shape[1]), np.int32)
        for i, sequence in enumerate(sequences):
            assert sequence.row is not None
            self._known[sequence.row] = len(sequence.blocks)
            known = [token for token in sequence.sampling.stop_token_ids if 0 <= token < 1 << 31][:STOPS]
            stops[i, : len(known)] = known
            tables[i, : len(sequence.blocks)] = sequence.blocks
        rows = self.upload(np.array([s.row for s in sequences], np.int64))
        columns = self.upload(fields).unbind(1)
        for buffer, column in zip(
            (self.token, self.position, self.limit, self.capacity, self.live), columns, strict=True
        ):
            buffer.index_copy_(0, rows, column)
        self.stops.index_copy_(0, rows, self.upload(stops))
        self.tables.index_copy_(0, rows, self.upload(tables))
        self.sampling.set(rows, [s.sampling for s in sequences])

    def grow(self, sequences: Seq[Sequence], block_size: int) -> None:
        """Add the new blocks of these sequences to their rows."""
        width = self.tables.shape[1]
        cells: list[int] = []
        blocks: list[int] = []
        for sequence in sequences:
            assert sequence.row is not None
            known, held = self._known[sequence.row], len(sequence.blocks)
            cells += range(sequence.row * width + known, sequence.row * width + held)
            blocks += sequence.blocks[known:]
            self._known[sequence.row] = held
        patch = self.upload(np.array([cells, blocks], np.int64))
        self.tables.view(-1).index_copy_(0, patch[0], patch[1].to(torch.int32))
        rows = self.upload(np.array([[s.row for s in sequences], [len(s.blocks) * block_size for s in sequences]]))
        self.capacity.index_copy_(0, rows[0], rows[1].to(torch.int32))

    def choose(self, sequences: Seq[Sequence], bucket: int) -> None:
        """Make these rows the current batch, and fill it up to `bucket` entries with the spare row."""
        rows = [s.row for s in sequences] + [self.spare] * (bucket - len(sequences))
        # Most launches have the same batch as the previous one. Then no upload delays their steps.
        if rows != self._chosen:
            self.entries[:bucket].copy_(self.upload(np.array(rows, np.int32)))
            self._chosen = rows
