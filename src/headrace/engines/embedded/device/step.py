"""One decode step, which runs entirely on the device: embed, run the layers, sample, record, advance.

The step reads and writes only buffers at fixed addresses, so it can be captured once per batch size and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.device.memory import DeviceCache
from headrace.engines.embedded.device.state import DeviceState
from headrace.engines.embedded.kernels.decode import choose_splits, paged_decode
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

    def __init__(self, model: Any, state: DeviceState, cache: DeviceCache, routing: RoutingShape | None) -> None:
        device, rows = state.device, state.rows
        self._model = model
        self._state = state
        self._cache = cache
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

    def run(self, bucket: int, variant: Variant) -> None:
        """Run one step for the first `bucket` entries of the batch, and write the next slot of the ring."""
        state = self._state
        entries, positions = state.entries[:bucket], self._positions[:bucket]
        ids, places = self._input_ids[:bucket], self._position_ids[:bucket]
        begin(state, entries, positions, ids, places)
        heads = self._cache.layers[0][0].shape[1]
        splits = choose_splits(bucket, heads, self._processors)
        context = _DecodeContext(self._cache, state.tables, entries, positions, splits)
        with attending(context), recording(self.recorder):
            logits = self._model(
                input_ids=ids[None], position_ids=places[None], use_cache=False, logits_to_keep=0
            ).logits[0]
        self.draw(logits, entries, positions, variant)

    def draw(self, logits: torch.Tensor, entries: torch.Tensor, positions: torch.Tensor, variant: Variant) -> None:
        """Sample the token after `positions` for these rows, record it in the ring, and advance the rows."""
        state, count = self._state, len(entries)
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
            slots, rows, device = self._state.ring.shape[0], self._state.rows, self._state.device
            self.kept_ring = torch.zeros((slots, rows, KEPT_LIMIT), dtype=torch.int32, device=device)
            self.count_ring = torch.zeros((slots, rows), dtype=torch.int32, device=device)
        return self.kept_ring, self.count_ring
