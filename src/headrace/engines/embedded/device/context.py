"""Attention contexts for one pass on the device: for a batch of single tokens, and for packed chunks of prompts."""

from __future__ import annotations

import torch

from headrace.engines.embedded.device.memory import DeviceCache
from headrace.engines.embedded.kernels.cache import write_cache
from headrace.engines.embedded.kernels.decode import paged_decode
from headrace.engines.embedded.kernels.prefill import paged_prefill
from headrace.models.attention import AttentionCall


class DecodeContext:
    """Attention of one new token per entry. The kernel stores its key and value and attends over the row's blocks."""

    def __init__(
        self, cache: DeviceCache, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, splits: int
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._rows = rows
        self._positions = positions
        self._splits = splits

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        keys, values = self._cache.layers[call.layer]
        out = paged_decode(
            call.query[0].transpose(0, 1),
            call.key[0].transpose(0, 1),
            call.value[0].transpose(0, 1),
            keys,
            values,
            self._tables,
            self._rows,
            self._positions,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
            splits=self._splits,
        )
        return out[None]


class PrefillContext:
    """Attention of packed chunks of prompts. All keys that a chunk sees, its own included, are in the cache."""

    def __init__(
        self,
        cache: DeviceCache,
        tables: torch.Tensor,
        *,
        rows: torch.Tensor,
        starts: torch.Tensor,
        offsets: torch.Tensor,
        slots: torch.Tensor,
        tiles: torch.Tensor,
        queries: int,
    ) -> None:
        """Describe the chunks of a pass.

        Chunk c holds the tokens `offsets[c]:offsets[c + 1]`. They begin at position `starts[c]` of row `rows[c]`.
        `tiles` is the result of `tiles_of` for the same number of queries.
        """
        self._cache = cache
        self._tables = tables
        self._rows = rows
        self._starts = starts
        self._offsets = offsets
        self._slots = slots
        self._tiles = tiles
        self._queries = queries

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        keys, values = self._cache.layers[call.layer]
        write_cache(call.key[0].transpose(0, 1), call.value[0].transpose(0, 1), keys, values, self._slots)
        out = paged_prefill(
            call.query[0].transpose(0, 1),
            keys,
            values,
            self._tables,
            self._rows,
            self._starts,
            self._offsets,
            self._tiles,
            queries=self._queries,
            scaling=call.scaling,
            window=call.window,
            softcap=call.softcap,
            sinks=call.sinks,
        )
        return out[None]
