"""One decode step, which runs entirely on the device: embed, run the layers, sample, record, advance.

The step reads and writes only buffers at fixed addresses, so it can be captured once per batch size and variant, when
it is first needed, and replayed from then on.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.device.graphs import Record, Replay, try_to_record
from headrace.engines.embedded.device.state import DeviceCache, DeviceState
from headrace.engines.embedded.kernels.attention import choose_splits, paged_decode
from headrace.engines.embedded.kernels.rows import advance, begin
from headrace.engines.embedded.kernels.sampling import sample
from headrace.models.attention import AttentionCall, attending
from headrace.models.experts import RoutingRecorder, RoutingShape, recording

Variant = Literal["plain", "filtered", "recorded"]
"""The kind of sampling of a step. `plain`: every token may be drawn. `filtered`: some tokens may not be drawn.
`recorded`: as `filtered`, and the kept tokens are recorded."""


def variant_of(sampling: Sampling) -> Variant:
    """Return the variant of a step that these sampling settings need."""
    if sampling.record_kept:
        return "recorded"
    truncated = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0 or bool(sampling.forbidden)
    return "filtered" if truncated else "plain"


def _buckets(rows: int) -> list[int]:
    """Return the batch sizes that are captured: powers of two and their halfway points, up to `rows`."""
    sizes = {2, rows}
    size = 4
    while size < rows:
        sizes |= {size, size + size // 2}
        size *= 2
    # A compiler treats a batch of one as a special shape, so it runs as a batch of two.
    return sorted(size for size in sizes if size <= max(rows, 2))


@dataclass(frozen=True)
class _DecodeContext:
    """Attention of one new token per entry. The kernel stores its key and value and attends over the row's blocks."""

    cache: DeviceCache
    tables: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor
    splits: int

    def attend(self, call: AttentionCall) -> torch.Tensor:
        keys, values = self.cache.layers[call.layer]
        return paged_decode(call, keys, values, self.tables, self.rows, self.positions, splits=self.splits)[None]


class DecodeStep:
    """The decode step of one model over one state and one cache."""

    def __init__(
        self,
        model: Any,
        state: DeviceState,
        cache: DeviceCache,
        *,
        routing: RoutingShape | None,
        record: Record | None,
    ) -> None:
        device, rows = state.device, state.rows
        self.model = model
        self.state = state
        self.cache = cache
        self.routing = routing
        self._record = record
        self._buckets = _buckets(rows)
        self._replays: dict[tuple[int, Variant], Replay] = {}
        self._processors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        with torch.inference_mode():
            # Made in inference mode, like the positions of prompts. Otherwise the layers would be compiled again.
            self._position_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        slots = state.ring.shape[0]
        self.recorder = RoutingRecorder(routing, rows, device) if routing is not None else None
        self.routing_ring: torch.Tensor | None = None
        if self.recorder is not None:
            self.routing_ring = torch.zeros((slots, *self.recorder.chosen.shape), dtype=torch.int16, device=device)
        self.kept_ring: torch.Tensor | None = None
        self.count_ring: torch.Tensor | None = None

    def bucket(self, entries: int) -> int:
        """Return the smallest batch size that holds this many entries."""
        return self._buckets[bisect_left(self._buckets, entries)]

    def prepare(self, bucket: int, variant: Variant) -> None:
        """Capture the step once. This changes the current batch and the ring, so call it before they are set."""
        if self._record is not None and (bucket, variant) not in self._replays:
            self.state.choose([], bucket)
            self.state.cursor.zero_()
            # Run once outside of the graph, so that kernels are compiled and library handles are made.
            self._compute(bucket, variant)
            self.state.cursor.zero_()
            replay = try_to_record(self._record, "decode steps run", lambda: self._compute(bucket, variant))
            if replay is None:
                self._record = None
            else:
                self._replays[bucket, variant] = replay

    def run(self, bucket: int, variant: Variant) -> None:
        """Run one step for the first `bucket` entries of the batch, and write the next slot of the ring."""
        replay = self._replays.get((bucket, variant))
        if replay is not None:
            replay()
        else:
            self._compute(bucket, variant)

    def _compute(self, bucket: int, variant: Variant) -> None:
        state = self.state
        entries, positions = state.entries[:bucket], self._positions[:bucket]
        ids, places = self._input_ids[:bucket], self._position_ids[:bucket]
        begin(state, entries, positions, ids, places)
        heads = self.cache.layers[0][0].shape[1]
        splits = choose_splits(bucket, heads, self._processors)
        context = _DecodeContext(self.cache, state.tables, entries, positions, splits)
        with attending(context), recording(self.recorder):
            logits = self.model(
                input_ids=ids[None], position_ids=places[None], use_cache=False, logits_to_keep=0
            ).logits[0]
        self.draw(logits, entries, positions, variant)

    def draw(self, logits: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, variant: Variant) -> None:
        """Sample the token after `positions` for these rows, record it in the ring, and advance the rows."""
        state, count = self.state, len(entries)
        kept_ids = kept_counts = None
        if variant == "recorded":
            kept_ids = torch.empty((count, KEPT_LIMIT), dtype=torch.int32, device=state.device)
            kept_counts = torch.empty(count, dtype=torch.int32, device=state.device)
        tokens, logprobs = sample(
            logits,
            entries,
            positions + 1,
            state.sampling,
            filtered=variant != "plain",
            kept_ids=kept_ids,
            kept_counts=kept_counts,
        )
        slot = state.cursor.long()
        if kept_ids is not None and kept_counts is not None:
            kept, counts = self._kept_rings()
            kept[:, :count].index_copy_(0, slot, kept_ids[None])
            counts[:, :count].index_copy_(0, slot, kept_counts[None])
        if self.recorder is not None and self.routing_ring is not None:
            self.routing_ring[:, :count].index_copy_(0, slot, self.recorder.chosen[None, :count])
        advance(state, entries, positions, tokens, logprobs)

    def _kept_rings(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept_ring is None or self.count_ring is None:
            slots, rows, device = self.state.ring.shape[0], self.state.rows, self.state.device
            self.kept_ring = torch.zeros((slots, rows, KEPT_LIMIT), dtype=torch.int32, device=device)
            self.count_ring = torch.zeros((slots, rows), dtype=torch.int32, device=device)
        return self.kept_ring, self.count_ring
