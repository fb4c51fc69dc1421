"""Passes over prompts: packed chunks of any number and length, described to the device in one upload.

Enqueuing a pass takes the host tens of milliseconds, whatever its size. A small model computes the pass in less time.
If the host would be slower than the GPU, passes are padded to a few sizes. A size is captured when it comes for the
second time, and replayed from then on.
"""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.engines.embedded.device.graphs import Record, Replay, try_to_record
from headrace.engines.embedded.device.state import DeviceCache
from headrace.engines.embedded.device.step import DecodeStep, Variant
from headrace.engines.embedded.kernels.attention import choose_queries, paged_prefill, tiles_of
from headrace.engines.embedded.kernels.cache import find_places, write_cache
from headrace.engines.embedded.kernels.rows import IDLE
from headrace.engines.embedded.scheduler import Chunk
from headrace.models.attention import AttentionCall, attending
from headrace.models.experts import RoutingRecorder, recording

LEAST_TOKENS, MOST_TOKENS = 256, 16384
"""The smallest and the largest captured size, in tokens. Captured sizes are powers of two."""
CHUNK_TOKENS = 8
"""The number of tokens per chunk in a captured pass. The pass has room for at least `LEAST_CHUNKS` chunks."""
LEAST_CHUNKS = 8
HOST_BOUND = 15 * 10**12
"""The number of tokens times parameters of a pass that a GPU computes about as fast as the host enqueues it. Above this
number, capturing gains nothing, and the padding would be wasted work."""


@dataclass(frozen=True)
class PassShape:
    """The size of a pass: how many tokens and chunks it has room for."""

    tokens: int
    chunks: int
    queries: int
    """The queries of one attention program; see `choose_queries`."""

    @property
    def tiles(self) -> int:
        """The largest number of attention tiles; see `tiles_of`."""
        return self.tokens // self.queries + self.chunks

    @property
    def lengths(self) -> dict[str, int]:
        """The fields of a pass's description, and the length of each."""
        per_token = dict.fromkeys(("ids", "owners"), self.tokens)
        per_chunk = dict.fromkeys(("rows", "starts", "kept", "entries", "positions"), self.chunks)
        return {**per_token, **per_chunk, "offsets": self.chunks + 1, "tiles": 2 * self.tiles}


@dataclass(frozen=True)
class _PrefillContext:
    """Attention of packed chunks of prompts. All keys that a chunk sees, its own included, are in the cache."""

    cache: DeviceCache
    tables: torch.Tensor
    part: dict[str, torch.Tensor]
    """The fields of the pass's description."""
    slots: torch.Tensor
    queries: int

    def attend(self, call: AttentionCall) -> torch.Tensor:
        (keys, values), part = self.cache.layers[call.layer], self.part
        write_cache(call.key[0].transpose(0, 1), call.value[0].transpose(0, 1), keys, values, self.slots)
        chunks = part["rows"], part["starts"], part["offsets"], part["tiles"].view(2, -1)
        return paged_prefill(call, keys, values, self.tables, *chunks, queries=self.queries)[None]


@dataclass(eq=False)
class _Pass:
    """A size that is captured: the buffer of its description on the device, and its replays."""

    told: torch.Tensor
    recorder: RoutingRecorder | None
    ran: set[Variant] = field(default_factory=set)
    replays: dict[Variant, Replay] = field(default_factory=dict)


class PromptPasses:
    """Computes chunks, stores their keys and values, and draws the next token of each sequence that is complete."""

    def __init__(self, step: DecodeStep, record: Record | None) -> None:
        self._model, self._cache, self._state, self._routing = step.model, step.cache, step.state, step.routing
        self._step = step
        self._record = record
        self._parameters = sum(p.numel() for p in self._model.parameters())
        self._itemsize = next(self._model.parameters()).element_size()
        self._passes: dict[PassShape, _Pass] = {}

    def run(self, chunks: Seq[Chunk], variant: Variant) -> None:
        """Enqueue one pass. Tokens are drawn for the chunks that sample, in their order."""
        counts = np.array([c.count for c in chunks], np.int32)
        shape = self._captured_shape(counts)
        if shape is None:
            # A compiler treats a pass of one token as a special shape, so a second token is added, which is not stored.
            shape = PassShape(max(2, int(counts.sum())), len(chunks), self._queries(int(counts.max())))
            told = self._state.upload(describe(shape, chunks, counts, self._state.spare))
            self._compute(shape, told, self._recorder(shape), variant)
            return
        if shape not in self._passes:
            told = torch.empty(_size(shape), dtype=torch.int32, device=self._state.device)
            self._passes[shape] = _Pass(told, self._recorder(shape))
        captured = self._passes[shape]
        self._state.upload(describe(shape, chunks, counts, self._state.spare), into=captured.told)

        def compute() -> None:
            self._compute(shape, captured.told, captured.recorder, variant)

        # The first pass of a kind runs uncaptured: it compiles the kernels, and most sizes never come again.
        if variant in captured.ran and variant not in captured.replays and self._record is not None:
            replay = try_to_record(self._record, "passes over prompts run", compute)
            if replay is None:
                self._record = None
            else:
                captured.replays[variant] = replay
        captured.ran.add(variant)
        captured.replays.get(variant, compute)()

    def _compute(
        self, shape: PassShape, told: torch.Tensor, recorder: RoutingRecorder | None, variant: Variant
    ) -> None:
        state, part = self._state, split_table(shape, told)
        ids, positions = part["ids"].long(), torch.empty(shape.tokens, dtype=torch.int64, device=told.device)
        slots = torch.empty_like(part["ids"])
        chunks = part["rows"], part["starts"], part["offsets"]
        find_places(part["owners"], *chunks, state.tables, self._cache.block_size, positions, slots)
        context = _PrefillContext(self._cache, state.tables, part, slots, shape.queries)
        kept = part["kept"].long()
        with attending(context), recording(recorder):
            logits = self._model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept
            ).logits[0]
        if recorder is not None and self._step.recorder is not None:
            self._step.recorder.chosen[: shape.chunks] = recorder.chosen[kept]
        self._step.draw(logits, part["entries"], part["positions"], variant)

    def _captured_shape(self, counts: npt.NDArray[np.int32]) -> PassShape | None:
        """Return the smallest captured size that has room for these chunks; None if capturing has no use."""
        if self._record is None:
            return None
        tokens = LEAST_TOKENS
        while tokens < counts.sum() or self._room(tokens) < len(counts):
            tokens *= 2
            if tokens > MOST_TOKENS:
                return None
        if tokens * self._parameters > HOST_BOUND:
            return None
        return PassShape(tokens, self._room(tokens), self._queries(int(counts.max())))

    def _room(self, tokens: int) -> int:
        return min(self._state.rows, max(LEAST_CHUNKS, tokens // CHUNK_TOKENS))

    def _queries(self, longest: int) -> int:
        keys, values = self._cache.layers[0]
        return choose_queries(longest, max(keys.shape[3], values.shape[3]), self._itemsize)

    def _recorder(self, shape: PassShape) -> RoutingRecorder | None:
        return RoutingRecorder(self._routing, shape.tokens, self._state.device) if self._routing else None


def describe(shape: PassShape, chunks: Seq[Chunk], counts: npt.NDArray[np.int32], spare: int) -> npt.NDArray[np.int32]:
    """Return the description of a pass for the device, in one array. Unused entries draw for the spare row."""
    ends = counts.cumsum()
    tokens = itertools.chain.from_iterable(c.sequence.tokens[c.start : c.start + c.count] for c in chunks)
    tiles = np.full((2, shape.tiles), -1, np.int32)
    found = tiles_of(counts, shape.queries)
    tiles[:, : found.shape[1]] = found
    sampled = [
        (end - 1, c.sequence.row, c.start + c.count - 1) for c, end in zip(chunks, ends, strict=True) if c.samples
    ]
    kept, entries, positions = np.array(sampled, np.int32).reshape(-1, 3).T
    # The values of each field, and the value of its unused places.
    fields: dict[str, tuple[Any, int]] = {
        "ids": (np.fromiter(tokens, np.int32, int(ends[-1])), 0),
        "owners": (np.repeat(np.arange(len(chunks)), counts), -1),
        "tiles": (tiles.reshape(-1), -1),
        "rows": ([c.sequence.row for c in chunks], 0),
        "starts": ([c.start for c in chunks], 0),
        "offsets": ([0, *ends], ends[-1]),
        "kept": (kept, 0),
        "entries": (entries, spare),
        "positions": (positions, IDLE),
    }
    table = np.empty(_size(shape), np.int32)
    for name, part in split_table(shape, table).items():
        values, nothing = fields[name]
        part.fill(nothing)
        part[: len(values)] = values
    return table


def split_table(shape: PassShape, whole: Any) -> dict[str, Any]:
    """Return the fields of a description, which `describe` made, as views.

    Each field begins at a multiple of 16 bytes, because kernels would be compiled again for another alignment.
    """
    parts, begin = {}, 0
    for name, length in shape.lengths.items():
        parts[name] = whole[begin : begin + length]
        begin += _aligned(length)
    return parts


def _size(shape: PassShape) -> int:
    return sum(_aligned(length) for length in shape.lengths.values())


def _aligned(length: int) -> int:
    return -(-length // 4) * 4
