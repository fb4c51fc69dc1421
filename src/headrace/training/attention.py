"""Attention within packed rows: a token sees its own sequence up to itself, shared prefix included, and nothing else.

The prefix's keys and values are computed once and receive the gradients of every sequence that reads them. What is to
be attended together and who sees whom is worked out once for a row, not in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.models.attention import AttentionCall
from headrace.training.packing import MicroBatch, Segment

JOINED_TOKENS = 64
"""Short segments are attended in one call up to this many tokens: a call's overhead against scores that are masked."""


@dataclass(frozen=True)
class _Block:
    """Queries of consecutive segments; their keys are one prefix before the block, if any, then the block itself."""

    segments: tuple[int, ...]
    prefix: int | None
    """The segment, outside of the block, that all of the block's segments continue."""
    masks: dict[tuple[int | None, torch.device], torch.Tensor | None] = field(default_factory=dict)


class PackedAttention:
    """The attention context of one row. Keep it until the backward pass is over."""

    def __init__(self, row: MicroBatch) -> None:
        self._segments = row.segments
        self._positions = torch.from_numpy(row.position_ids)
        self._blocks = list(_blocks(row.segments))
        # One split of the row, along the borders of blocks: its backward is one concatenation, where a slice per block
        # would write a zero gradient of the whole row for each.
        self._lengths = [sum(row.segments[i].length for i in block.segments) for block in self._blocks]
        self._block_of = {block.segments[0]: i for i, block in enumerate(self._blocks) if len(block.segments) == 1}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output, [1, T, H, Dv]."""
        queries = torch.split(call.query, self._lengths, dim=2)
        keys = torch.split(call.key, self._lengths, dim=2)
        values = torch.split(call.value, self._lengths, dim=2)
        outputs = []
        for i, block in enumerate(self._blocks):
            key, value = keys[i], values[i]
            if block.prefix is not None:
                parent = self._block_of[block.prefix]
                key = torch.cat([keys[parent], key], dim=2)
                value = torch.cat([values[parent], value], dim=2)
            mask = self._mask(block, call.window, call.query.device)
            outputs.append(_attend(queries[i], key, value, mask, call).transpose(1, 2))
        return torch.cat(outputs, dim=1)

    def _mask(self, block: _Block, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Who sees whom, [queries, keys]; None where that is exactly "all before it"."""
        if (window, device) not in block.masks:
            length = self._segments[block.segments[0]].length
            plain = len(block.segments) == 1 and block.prefix is None and (window is None or window >= length)
            block.masks[window, device] = None if plain else self._visible(block, window).to(device)
        return block.masks[window, device]

    def _visible(self, block: _Block, window: int | None) -> torch.Tensor:
        external = () if block.prefix is None else (block.prefix,)
        queries, query_segments = self._tokens(block.segments)
        keys, key_segments = self._tokens((*external, *block.segments))
        parents = torch.tensor([-1 if s.prefix is None else s.prefix for s in self._segments])[query_segments]
        own = (query_segments[:, None] == key_segments) & (queries[:, None] >= keys)
        mask = own | (parents[:, None] == key_segments)
        if window is not None:
            mask &= self._positions[queries][:, None] - self._positions[keys] < window
        return mask

    def _tokens(self, segments: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """The row indices of these segments' tokens, and the segment of each."""
        spans = [self._segments[i] for i in segments]
        lengths = torch.tensor([span.length for span in spans])
        indices = torch.cat([torch.arange(span.start, span.end) for span in spans])
        return indices, torch.repeat_interleave(torch.tensor(segments), lengths)


def _blocks(segments: tuple[Segment, ...]) -> Iterator[_Block]:
    """Cut a row into blocks: whole families while they are short, else the prefix and runs of its continuations."""
    taken: list[int] = []
    size = 0
    for family in _families(segments):
        total = sum(segments[i].length for i in family)
        if taken and size + total > JOINED_TOKENS:
            yield _Block(tuple(taken), None)
            taken, size = [], 0
        if total <= JOINED_TOKENS:
            taken += family
            size += total
        else:
            yield from _split_family(segments, family)
    if taken:
        yield _Block(tuple(taken), None)


def _families(segments: tuple[Segment, ...]) -> Iterator[list[int]]:
    """Segments that depend on each other: one alone, or a prefix with all that continue it."""
    family: list[int] = []
    for i, segment in enumerate(segments):
        if family and segment.prefix is None:
            yield family
            family = []
        family.append(i)
    yield family


def _split_family(segments: tuple[Segment, ...], family: list[int]) -> Iterator[_Block]:
    prefix, *rest = family
    yield _Block((prefix,), None)
    taken: list[int] = []
    size = 0
    for i in rest:
        length = segments[i].length
        if size and length and size + length > JOINED_TOKENS:
            yield _Block(tuple(taken), prefix)
            taken, size = [], 0
        taken.append(i)
        size += length
    if size:
        yield _Block(tuple(taken), prefix)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """[1, H, n, D] x [1, K, m, D] -> [1, H, n, Dv]."""
    if call.softcap is None and call.sinks is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=call.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return _explicit(query, key, value, mask, call)


def _explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """Attention by its definition, for what the fused kernels do not have: capped scores and sinks."""
    heads, n = query.shape[1:3]
    kv_heads = key.shape[1]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, n, query.shape[-1])
    scores = torch.matmul(grouped, key.unsqueeze(2).transpose(-1, -2)) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")).to(torch.promote_types(scores.dtype, torch.float32))
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype).reshape(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        # A sink takes its share of the attention and gives nothing.
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probabilities = scores.softmax(dim=-1)
    output = torch.matmul(probabilities.to(value.dtype), value.unsqueeze(2))
    return output.reshape(1, heads, n, -1)
