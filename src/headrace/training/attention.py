"""Attention within packed rows: a token sees its own sequence up to itself, shared prefix included, and nothing else.

The keys and values of a prefix are computed once, and receive the gradients of every sequence that reads them. The
blocks of a row and their masks are planned once for a row, not in every layer.

On a GPU in 16 bits, variable-length kernels compute the attention, exactly and without a mask. Every segment attends to
itself causally. A segment that continues a shared prefix also attends to the whole prefix, in a second call. The two
results are joined by their log-sum-exps. The backward pass of a kernel needs only the joined output and the joined
log-sum-exp to compute its share of the gradients, so the shares add up to the whole gradient.

Blocks are the exact path for everything else: capped scores, sinks, windows that end within a shared prefix, and other
dtypes. They compute attention by its definition, so they are the reference for every kernel. Their gradient needs no
autograd, so it can run inside an operation that a compiler does not look into.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.models.attention import AttentionCall, keep_for_backward
from headrace.models.head import HALF
from headrace.training.devices import upload
from headrace.training.rows import MicroBatch, Segment

LARGEST_HEAD = 256
JOINED_TOKENS = 64
"""Short segments are attended together, up to this many tokens in one call. Fewer calls save overhead, but more scores
are computed only to be masked."""


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


@dataclass(frozen=True)
class _Block:
    """The queries of consecutive segments. Their keys are a prefix before the block, if any, then the block itself."""

    segments: tuple[int, ...]
    prefix: int | None
    """The segment outside the block that all segments of the block continue."""
    masks: dict[tuple[int | None, torch.device], torch.Tensor | None] = field(default_factory=dict)


class PackedAttention:
    """The attention context of one row. Keep it until the backward pass is over."""

    def __init__(self, row: MicroBatch, kernels: Kernels | None = None) -> None:
        """Plan the row. `kernels` replace the GPU's kernels, on any device."""
        self.ticket = keep_for_backward(self)
        self._row = row
        self._kernels = kernels or Kernels()
        self._ranges: RowRanges | None = None
        self._segments = row.segments
        self._positions = torch.from_numpy(row.position_ids)
        self._blocks = list(_blocks(row.segments))
        # The row is split once, along the borders of blocks. The backward pass of a split is one concatenation; a slice
        # per block would write a zero gradient of the whole row for each block.
        self._lengths = [sum(row.segments[i].length for i in block.segments) for block in self._blocks]
        self._block_of = {block.segments[0]: i for i, block in enumerate(self._blocks) if len(block.segments) == 1}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output, [1, T, H, Dv]."""
        flash = self._flash(call)
        if flash is None:
            blocks = [_attend(*inputs, call).transpose(1, 2) for _, inputs in self._cut(call)]
            return torch.cat(blocks, dim=1)
        output: torch.Tensor = FlashAttention.apply(*_flat(call), flash)  # type: ignore[no-untyped-call]
        return output[None]

    def attend_saving(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """See `models.attention.TrainedContext.attend_saving`."""
        flash = self._flash(call)
        if flash is not None:
            output, lse = flash.forward(*_flat(call))
            return output[None], lse
        outputs, sums = [], []
        for _, inputs in self._cut(call):
            output, lse = _attend_block(*inputs, call)
            outputs.append(output.transpose(1, 2))
            sums.append(lse)
        return torch.cat(outputs, dim=1), torch.cat(sums, dim=1)

    def attend_backward(
        self, call: AttentionCall, output: torch.Tensor, lse: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """See `models.attention.TrainedContext.attend_backward`."""
        flash = self._flash(call)
        if flash is not None:
            dq, dk, dv = flash.backward(gradient[0], *_flat(call), output[0], lse)
            return dq[None], dk[None], dv[None], None
        grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (call.query, call.key, call.value)]
        sinks = None if call.sinks is None else torch.zeros_like(call.sinks, dtype=lse.dtype)
        start = 0
        for (block, inputs), length in zip(self._cut(call), self._lengths, strict=True):
            mine = slice(start, start + length)
            of_output = gradient[:, mine].transpose(1, 2)
            of_query, *found, of_sinks = _attend_block_backward(*inputs, call, lse[:, mine], of_output)
            grads[0][:, :, mine] += of_query
            prefix = 0 if block.prefix is None else self._segments[block.prefix].length
            for grad, part in zip(grads[1:], found, strict=True):
                grad[:, :, mine] += part[:, :, prefix:]
                if block.prefix is not None:
                    before = self._segments[block.prefix]
                    grad[:, :, before.start : before.end] += part[:, :, :prefix]
            if sinks is not None:
                sinks += of_sinks
            start += length
        dq, dk, dv = (grad.to(call.query.dtype).transpose(1, 2) for grad in grads)
        return dq, dk, dv, None if sinks is None or call.sinks is None else sinks.to(call.sinks.dtype)

    def _flash(self, call: AttentionCall) -> RowAttention | None:
        """Return the attention by kernels, or None if the kernels cannot compute this call."""
        if call.softcap is not None or call.sinks is not None or not self._kernels.take(call.query, call.value):
            return None
        if self._ranges is None:
            self._ranges = RowRanges(self._row, call.query.device)
        if not self._ranges.takes(call.window):
            return None
        return RowAttention(self._ranges, self._kernels, call.scaling, call.window)

    def _cut(
        self, call: AttentionCall
    ) -> Iterator[tuple[_Block, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]]:
        """Yield each block with its queries, keys, values and mask. The keys and values of its prefix come first."""
        queries = torch.split(call.query, self._lengths, dim=2)
        keys = torch.split(call.key, self._lengths, dim=2)
        values = torch.split(call.value, self._lengths, dim=2)
        for i, block in enumerate(self._blocks):
            key, value = keys[i], values[i]
            if block.prefix is not None:
                parent = self._block_of[block.prefix]
                key = torch.cat([keys[parent], key], dim=2)
                value = torch.cat([values[parent], value], dim=2)
            yield block, (queries[i], key, value, self._mask(block, call.window, call.query.device))

    def _mask(self, block: _Block, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return which keys each query sees, [queries, keys]. None means plain causal attention."""
        if (window, device) not in block.masks:
            length = self._segments[block.segments[0]].length
            plain = len(block.segments) == 1 and block.prefix is None and (window is None or window >= length)
            block.masks[window, device] = None if plain else upload(self._visible(block, window), device)
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
        """Return the row indices of these segments' tokens, and the segment of each token."""
        spans = [self._segments[i] for i in segments]
        lengths = torch.tensor([span.length for span in spans])
        indices = torch.cat([torch.arange(span.start, span.end) for span in spans])
        return indices, torch.repeat_interleave(torch.tensor(segments), lengths)


def _blocks(segments: tuple[Segment, ...]) -> Iterator[_Block]:
    """Cut a row into blocks: whole families if they are short, else the prefix and runs of its continuations.

    A run of more than `JOINED_TOKENS` tokens is one family alone. Its prefix is a block of its own.
    """
    families: list[list[int]] = []
    for i, segment in enumerate(segments):
        if segment.prefix is None:
            families.append([])
        families[-1].append(i)
    sizes = [sum(segments[i].length for i in family) for family in families]
    for run in _runs(sizes):
        members = [i for number in run for i in families[number]]
        if sum(sizes[number] for number in run) <= JOINED_TOKENS:
            yield _Block(tuple(members), None)
            continue
        prefix, *rest = members
        yield _Block((prefix,), None)
        for part in _runs([segments[i].length for i in rest]):
            yield _Block(tuple(rest[number] for number in part), prefix)


def _runs(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of runs of at most `JOINED_TOKENS` each. A larger size gets a run of its own."""
    taken: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if total and size and total + size > JOINED_TOKENS:
            yield taken
            taken, total = [], 0
        taken.append(i)
        total += size
    if total:
        yield taken


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """Compute [1, H, n, D] x [1, K, m, D] -> [1, H, n, Dv]."""
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
    return _attend_block(query, key, value, mask, call)[0]


def _flat(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values as [T, heads, D], with the elements of each head contiguous."""
    q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
    return _dense(q), _dense(k), _dense(v)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [1, H, n, D] x [1, K, m, D] -> the output [1, H, n, Dv] and the log-sum-exp of its scores [H, n]."""
    heads, n = query.shape[1:3]
    scores, _ = _scores(query, key, mask, call)
    lse = scores.logsumexp(dim=-1)
    if call.sinks is not None:
        # A sink takes its share of the attention and contributes nothing to the output.
        lse = torch.logaddexp(lse, call.sinks.to(lse.dtype).reshape(1, key.shape[1], -1, 1))
    probabilities = (scores - lse[..., None]).exp()
    output = torch.matmul(probabilities.to(value.dtype), value.unsqueeze(2))
    return output.reshape(1, heads, n, -1), lse.reshape(heads, n)


def _attend_block_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    lse: torch.Tensor,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key, value and sinks (empty if there are none), in the dtype of `lse`."""
    kv_heads, precise = key.shape[1], lse.dtype
    scores, slope = _scores(query, key, mask, call)
    grouped = _grouped(query, kv_heads).to(precise)
    of_output = _grouped(gradient, kv_heads).to(precise)
    sums = _grouped(lse[None, ..., None], kv_heads)
    probabilities = (scores - sums).exp()
    of_probabilities = torch.matmul(of_output, value.to(precise).unsqueeze(2).transpose(-1, -2))
    # All scores of a query have this term in common, because the query's probabilities add up to one.
    common = (probabilities * of_probabilities).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - common)
    if slope is not None:
        of_scores = of_scores * slope
    of_scores = of_scores * call.scaling
    of_query = torch.matmul(of_scores, key.to(precise).unsqueeze(2)).reshape(query.shape)
    of_key = torch.matmul(of_scores.transpose(-1, -2), grouped).sum(dim=2)
    of_value = torch.matmul(probabilities.transpose(-1, -2), of_output).sum(dim=2)
    if call.sinks is None:
        return of_query, of_key, of_value, lse.new_empty(0)
    # The value of a sink is zero: a sink only takes attention from the other tokens.
    share = (call.sinks.to(precise).reshape(1, kv_heads, -1, 1, 1) - sums).exp()
    return of_query, of_key, of_value, -(share * common).sum(dim=(-1, -2)).reshape(-1)


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masked scores, [1, K, H / K, n, m] in float32 at least, and the slope of their cap, if they are capped."""
    n = query.shape[2]
    scores = torch.matmul(_grouped(query, key.shape[1]), key.unsqueeze(2).transpose(-1, -2)) * call.scaling
    slope = None
    if call.softcap is not None:
        bent = torch.tanh(scores / call.softcap)
        scores, slope = bent * call.softcap, 1 - bent.square()
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, float("-inf")).to(torch.promote_types(scores.dtype, torch.float32)), slope


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape [1, H, ...] to [1, K, H / K, ...]."""
    return x.reshape(1, kv_heads, x.shape[1] // kv_heads, *x.shape[2:])
