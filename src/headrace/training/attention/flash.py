"""Attention of a packed row by variable-length kernels, exact and without a mask, also where sequences share a prefix.

Every segment attends to itself causally. A segment that continues a shared prefix also attends to the whole prefix, in
a second call. The two results are joined by their log-sum-exps. The backward pass of a kernel needs only the joined
output and the joined log-sum-exp to compute its share of the gradients, so the shares add up to the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.models.head import HALF
from headrace.training.devices import upload
from headrace.training.rows.base import MicroBatch

LARGEST_HEAD = 256


class Ranges(NamedTuple):
    """The ranges of queries and keys that see each other: range i of the queries sees range i of the keys."""

    queries: torch.Tensor  # int32 [n + 1], the start of each range, and the end of the last
    keys: torch.Tensor
    longest_query: int
    longest_key: int
    causal: bool


class Kernels:
    """The CUDA kernels of torch. Queries are [T, H, D], keys and values [T', K, D], log-sum-exps [H, T]."""

    def take(self, query: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether the kernels can compute on tensors like these."""
        size = query.shape[-1]
        fits = size == value.shape[-1] and size % 8 == 0 and size <= LARGEST_HEAD
        return fits and query.is_cuda and query.dtype in HALF

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: Ranges, scale: float, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the log-sum-exp of every query's scores."""
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *ranges[:4], 0.0, ranges.causal, False, **_options(scale, window)
        )
        return output, lse

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of queries, keys and values."""
        # The kernel wants the random state of dropout, but there is no dropout.
        state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.aten._flash_attention_backward(
            gradient, q, k, v, output, lse, *ranges[:4], 0.0, ranges.causal, state, unused, **_options(scale, window)
        )
        return found


def _options(scale: float, window: int | None) -> dict[str, float]:
    # The kernels do not count the query's own token as part of the window.
    return {"scale": scale} | ({} if window is None else {"window_size_left": window - 1, "window_size_right": 0})


class RowRanges:
    """The ranges of one row, planned once for all layers."""

    def __init__(self, row: MicroBatch, device: torch.device) -> None:
        own = [s.length for s in row.segments if s.length]
        self.own = _ranges(own, own, device, causal=True)
        self.longest = int(row.position_ids.max()) + 1
        """The length of the longest sequence, its prefix included."""
        families: dict[int, list[int]] = {}
        for i, segment in enumerate(row.segments):
            if segment.prefix is not None and segment.length:
                families.setdefault(segment.prefix, []).append(i)
        self.shared: Ranges | None = None
        if families:
            prefixes = [row.segments[prefix] for prefix in families]
            # The segments that continue a prefix are contiguous.
            spans = [(row.segments[members[0]].start, row.segments[members[-1]].end) for members in families.values()]
            self.continuing = _places(spans, device)
            self.prefixes = _places([(p.start, p.end) for p in prefixes], device)
            self.shared = _ranges([b - a for a, b in spans], [p.length for p in prefixes], device, causal=False)

    def takes(self, window: int | None) -> bool:
        """Return whether the kernels can use this window. They cannot if the window may end within a shared prefix."""
        return window is None or self.shared is None or window >= self.longest


def _ranges(queries: Sequence[int], keys: Sequence[int], device: torch.device, *, causal: bool) -> Ranges:
    def borders(lengths: Sequence[int]) -> torch.Tensor:
        return upload(np.cumsum([0, *lengths], dtype=np.int32), device)

    return Ranges(borders(queries), borders(keys), max(queries), max(keys), causal)


def _places(spans: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return upload(np.concatenate([np.arange(start, end) for start, end in spans]), device)


class RowAttention(NamedTuple):
    """The attention of one layer over one row."""

    row: RowRanges
    kernels: Kernels
    scale: float
    window: int | None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [T, H, D] and the log-sum-exps [H, T]."""
        row = self.row
        output, lse = self.kernels.forward(q, k, v, row.own, self.scale, self._own_window)
        if row.shared is None:
            return output, lse
        at, before = row.continuing, row.prefixes
        other, other_lse = self.kernels.forward(q[at], k[before], v[before], row.shared, self.scale, None)
        own_lse = lse[:, at]
        joined = torch.logaddexp(own_lse, other_lse)

        def share(part: torch.Tensor, part_lse: torch.Tensor) -> torch.Tensor:
            return part * (part_lse - joined).exp().t()[..., None]

        output.index_copy_(0, at, (share(output[at], own_lse) + share(other, other_lse)).to(output.dtype))
        lse.index_copy_(1, at, joined)
        return output, lse

    def backward(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of the output of `forward` with respect to q, k and v."""
        row = self.row
        dq, dk, dv = self.kernels.backward(gradient, q, k, v, output, lse, row.own, self.scale, self._own_window)
        if row.shared is not None:
            at, before = row.continuing, row.prefixes
            joined = output[at], lse[:, at].contiguous()
            more = self.kernels.backward(
                gradient[at], q[at], k[before], v[before], *joined, row.shared, self.scale, None
            )
            for whole, part, places in zip((dq, dk, dv), more, (at, before, before), strict=True):
                whole.index_add_(0, places, part)
        return dq, dk, dv

    @property
    def _own_window(self) -> int | None:
        return None if self.window is None or self.window >= self.row.longest else self.window


class FlashAttention(torch.autograd.Function):
    """The operation of `RowAttention` for autograd."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        """Return the output, [T, H, D]."""
        output, lse = attention.forward(q, k, v)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.attention = attention
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k and v."""
        return (*ctx.attention.backward(gradient.contiguous(), *ctx.saved_tensors), None)
