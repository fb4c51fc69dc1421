"""Attention over the paged cache in plain torch, for one forward pass over mixed chunks.

In the packed row, chunks of a single token come first (decodes, from short to long), and then the longer chunks.
Decodes attend in bands of similar length; each band is padded to its longest sequence. A longer chunk attends alone.
Index tensors and masks are made once per pass and window, not once per layer.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.engines.embedded.kv_cache import KVCache
from headrace.engines.embedded.scheduler import Chunk
from headrace.models.attention import AttentionCall

BAND_TOKENS = 512
"""The cost of one more band, in padded tokens. Rows are split into two bands if that saves more than this."""


def bands(widths: Seq[int], cost: float) -> list[tuple[int, int]]:
    """Cut rows of ascending widths into bands `(first, end)` of the least total cost.

    Each band is padded to its widest row. The total cost is the padded widths of all rows, plus `cost` for every band.
    """
    ends = [i + 1 for i in range(len(widths)) if i + 1 == len(widths) or widths[i + 1] > widths[i]]
    # For each place where the width changes, the best way to cut the rows before it: (total, start of the last band).
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for end in ends:
        best[end] = min((best[first][0] + cost + (end - first) * widths[end - 1], first) for first in best)
    found = []
    end = len(widths)
    while end:
        found.append((best[end][1], end))
        end = best[end][1]
    return found[::-1]


@dataclass(frozen=True)
class _View:
    """The keys that some rows of queries see: blocks of the cache, and a bias for every key (0 or minus infinity)."""

    blocks: torch.Tensor
    bias: torch.Tensor


class PagedContext:
    """An attention context that writes new keys and values to the cache, then attends over each sequence's blocks."""

    def __init__(self, cache: KVCache, chunks: Seq[Chunk], device: torch.device) -> None:
        singles = sorted((c for c in chunks if c.count == 1), key=lambda c: c.start)
        self.rows = singles + [c for c in chunks if c.count > 1]
        """The chunks in the order of the packed row."""
        self._cache = cache
        self._device = device
        self._singles = len(singles)
        size = cache.block_size
        self._bands = bands([c.start // size + 1 for c in singles], BAND_TOKENS / size)
        self._slots = self._index(self._slot_numbers())
        self._views: dict[tuple[int, int, int | None, torch.dtype], _View] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        key, value = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)
        self._cache.write(call.layer, self._slots, key, value)
        parts = self._attend_singles(call) if self._singles else []
        offset = self._singles
        for row in range(self._singles, len(self.rows)):
            parts.append(self._attend_chunk(call, row, offset))
            offset += self.rows[row].count
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def _attend_singles(self, call: AttentionCall) -> list[torch.Tensor]:
        count, heads, size = self._singles, call.query.shape[1], call.query.shape[3]
        kv_heads = call.key.shape[1]
        # The query heads that share a key head become its query rows, so no key is repeated in memory.
        query = call.query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, size)
        sinks = call.sinks.view(1, kv_heads, heads // kv_heads, 1) if call.sinks is not None else None
        parts = []
        for first, end in self._bands:
            view = self._view(first, end, call)
            keys, values = self._cache.read(call.layer, view.blocks, end - first)
            out = attention(query[first:end], keys.transpose(1, 2), values.transpose(1, 2), view.bias, call, sinks)
            parts.append(out.reshape(end - first, heads, -1))
        return parts

    def _attend_chunk(self, call: AttentionCall, row: int, offset: int) -> torch.Tensor:
        chunk = self.rows[row]
        query = call.query[0, :, offset : offset + chunk.count]
        if chunk.start == 0:
            key, value = (x[0, :, offset : offset + chunk.count] for x in (call.key, call.value))
            return attend_alone(query, key, value, call)
        view = self._view(row, row + 1, call)
        keys, values = self._cache.read(call.layer, view.blocks, 1)
        return _attend_grouped(query, keys[0].transpose(0, 1), values[0].transpose(0, 1), view.bias, call)

    def _view(self, first: int, end: int, call: AttentionCall) -> _View:
        """Return the view of these rows, which must have equally many tokens. Views are cached."""
        key = (first, end, call.window, call.query.dtype)
        if key not in self._views:
            self._views[key] = self._make_view(self.rows[first:end], call.window, call.query.dtype)
        return self._views[key]

    def _make_view(self, chunks: Seq[Chunk], window: int | None, dtype: torch.dtype) -> _View:
        size = self._cache.block_size
        # Blocks that lie entirely before the window are not read.
        first = [0 if window is None else max(0, c.start - window + 1) // size for c in chunks]
        last = [(c.start + c.count - 1) // size for c in chunks]
        width = max(b - a + 1 for a, b in zip(first, last, strict=True))
        table = np.zeros((len(chunks), width), np.int64)
        for row, (chunk, a, b) in enumerate(zip(chunks, first, last, strict=True)):
            table[row, : b - a + 1] = chunk.sequence.blocks[a : b + 1]
            # Padding reads the sequence's own last block. A foreign block could hold numbers that are not finite.
            table[row, b - a + 1 :] = chunk.sequence.blocks[b]
        keys = np.array(first)[:, None] * size + np.arange(width * size)
        queries = np.array([c.start for c in chunks])[:, None] + np.arange(chunks[0].count)
        bias = _bias(self._index(queries)[:, :, None], self._index(keys)[:, None, :], window, dtype)
        return _View(self._index(table.reshape(-1)), bias[:, None])

    def _slot_numbers(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        size = self._cache.block_size
        slots = [
            chunk.sequence.blocks[position // size] * size + position % size
            for chunk in self.rows
            for position in range(chunk.start, chunk.start + chunk.count)
        ]
        return np.array(slots, np.int64)

    def _index(self, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class DenseContext:
    """An attention context for one whole sequence without a cache."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        return attend_alone(call.query[0], call.key[0], call.value[0], call)[None]


def attend_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Compute the causal attention of the first tokens of a sequence over themselves: [H, T, D] to [T, H, Dv]."""
    length = query.shape[1]
    if call.window is None or call.window >= length:
        return _attend_grouped(query, key, value, None, call)
    positions = torch.arange(length, device=query.device)
    return _attend_grouped(
        query, key, value, _bias(positions[:, None], positions[None], call.window, query.dtype), call
    )


def _attend_grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    heads, length, size = query.shape
    kv_heads = key.shape[0]
    query = query.reshape(kv_heads, heads // kv_heads, length, size)
    # Expanded with stride 0, so the kernel reads one key head for all query heads that share it.
    key = key[:, None].expand(-1, heads // kv_heads, -1, -1)
    value = value[:, None].expand(-1, heads // kv_heads, -1, -1)
    sinks = call.sinks.view(kv_heads, heads // kv_heads, 1, 1) if call.sinks is not None else None
    return attention(query, key, value, bias, call, sinks).flatten(0, 1).transpose(0, 1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    call: AttentionCall,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute softmax attention with the call's scaling, softcap and sinks. Without a bias, it is causal."""
    if call.softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=bias, is_causal=bias is None, scale=call.scaling
        )
    if bias is None:
        positions = torch.arange(query.shape[-2], device=query.device)
        bias = _bias(positions[:, None], positions[None], None, query.dtype)
    scores = (query @ key.transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = (scores + bias).float()
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value


def _bias(queries: torch.Tensor, keys: torch.Tensor, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
