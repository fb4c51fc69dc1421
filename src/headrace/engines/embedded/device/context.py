"""Attention of one pass on the device: a batch of single tokens, or packed chunks of prompts."""

from __future__ import annotations

import torch

from headrace.engines.embedded.device.memory import DeviceCache
from headrace.engines.embedded.kernels.cache import write_cache
from headrace.engines.embedded.kernels.decode import paged_decode
from headrace.engines.embedded.kernels.prefill import paged_prefill
from headrace.models.attention import AttentionCall


class DecodeContext:
    """One new token per entry; the kernel stores its key and value, then attends over the row's blocks."""

    def __init__(
        self, cache: DeviceCache, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, splits: int
    ) -> None:
        self._cache = cache
        self._tables = tables
        self._rows = rows
        self._positions = positions
        self._splits = splits

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output of one layer, [1, T, H, Dv]."""
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
    """Chunks of prompts, one after the other; what a chunk sees is in the cache, itself included."""

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
        """Chunk c holds the tokens `offsets[c]:offsets[c + 1]`, from position `starts[c]` of row `rows[c]` on.

        `tiles` are those of `tiles_of` for so many queries.
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
        """The attention output of one layer, [1, T, H, Dv]."""
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
