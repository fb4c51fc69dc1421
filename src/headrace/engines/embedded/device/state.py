"""What lives on the device at fixed addresses: the KV cache, sized from the free memory, and the state of every row.

The cache may take the memory that is free after the model is loaded, minus the weights that a delivery stages beside
the live ones, if any, and minus a margin for activations and captured graphs. The last row is a spare
that is never live: entries that only fill a batch up to its bucket point at the spare row. The host changes rows only
through the engine's stream, so a launch that is in flight never sees a change.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.kernels.rows import STOPS, RowBuffers
from headrace.engines.embedded.kernels.sampling import SamplingRows
from headrace.engines.embedded.sequence import Sequence
from headrace.engines.embedded.transfer import Uploads
from headrace.errors import UserError
from headrace.models.attention import AttentionCall, attending
from headrace.models.fp8 import FP8

LayerShape = tuple[int, int, int]
"""The number of key/value heads, the size of a key, the size of a value."""
MARGIN = 0.10
"""The share of the device's memory that the cache leaves to activations and graphs."""


class DeviceCache:
    """Keys and values by layer, `[blocks, heads, block_size, head size]`. A head's part of a block is contiguous."""

    def __init__(
        self, shapes: Seq[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.layers = [
            (
                torch.zeros((blocks, heads, block_size, key), dtype=dtype, device=device),
                torch.zeros((blocks, heads, block_size, value), dtype=dtype, device=device),
            )
            for heads, key, value in shapes
        ]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks in all layers. Every source is read before any target is written."""
        for stores in self.layers:
            for store in stores:
                # As integers, because torch selects no FP8 numbers by index.
                store = store.view(torch.uint8) if store.dtype == FP8 else store
                store.index_copy_(0, targets.long(), store.index_select(0, sources))


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of what each layer stores for a token, found by a pass through the model."""
    probe = _Probe()
    with torch.inference_mode(), attending(probe):
        # Made in inference mode, as in every pass. Otherwise the layers would be compiled again.
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1)
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def affordable_blocks(
    device: torch.device, shapes: Seq[LayerShape], block_size: int, itemsize: int, fraction: float | None, staged: int
) -> int:
    """Return how many blocks the device has room for beside `staged` bytes of weights and the margin.

    With `fraction`, the cache and everything else in this process stay within that share of the device's memory. Raises
    `UserError` if there is no room for one block.
    """
    block_bytes = bytes_of_block(shapes, block_size, itemsize)
    room = free_bytes(device, fraction) - staged
    if room < block_bytes:
        raise UserError(
            f"no memory is left for a KV cache on {torch.cuda.get_device_name(device)}: {(room + staged) / 2**30:.1f}"
            f" GiB are free beside a margin, and staged weights need {staged / 2**30:.1f} GiB"
        )
    return room // block_bytes


def bytes_of_block(shapes: Seq[LayerShape], block_size: int, element_size: int) -> int:
    """Return the bytes of one block of the cache."""
    return block_size * element_size * sum(heads * (key + value) for heads, key, value in shapes)


def free_bytes(device: torch.device, fraction: float | None) -> int:
    """Return the bytes that cache and staged weights may take: what is free, minus the margin."""
    free, total = torch.cuda.mem_get_info(device)
    if fraction is not None:
        free = min(free, int(fraction * total) - torch.cuda.memory_reserved(device))
    return free - int(MARGIN * total * (fraction or 1.0))


class _Probe:
    """An attention context that returns zeros and records the shapes of what each layer would store."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.shapes[call.layer] = (call.key.shape[1], call.key.shape[3], call.value.shape[3])
        _, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(1, tokens, heads, call.value.shape[3])


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
