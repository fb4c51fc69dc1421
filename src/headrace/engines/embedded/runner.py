"""The runner of the host: plain torch, and each call waits for its plan. CPUs use it, and GPU tests compare with it.

In the packed row of a pass, chunks of a single token come first (decodes, from short to long), and then the longer
chunks. Decodes attend in bands of similar length; each band is padded to its longest sequence. A longer chunk attends
alone. Index tensors and masks are made once per pass and window, not once per layer.

On a CPU, weights are laid out for the processor once, not again in every call, so matrix products are faster. The
parameters keep their names, shapes, addresses and digests. A packed copy is used only while its parameters are
unchanged, so a swap of weights is never answered with old weights.
"""

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from headrace.engines.embedded.base import Runner, Timings
from headrace.engines.embedded.likeliest import read_likeliest
from headrace.engines.embedded.sampler import draw
from headrace.engines.embedded.scheduler import Chunk, StepPlan
from headrace.engines.embedded.sequence import Sampled
from headrace.engines.embedded.transfer import Arriving
from headrace.models.attention import AttentionCall, attending
from headrace.models.experts import RoutingRecorder, RoutingShape, recording
from headrace.models.fp8 import through_fp8
from headrace.types import Float32Array, Int32Array

BAND_TOKENS = 512
"""The cost of one more band, in padded tokens. Rows are split into two bands if that saves more than this."""
SMALLEST_PACKED = 1 << 18
"""Products with fewer weights than this are not packed, because the fixed cost of a packed call outweighs the gain."""

_switch = threading.Lock()
_inside = 0
_before = True

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input. One product computes all of them."""


class HostRunner(Runner):
    """A `Runner` that computes each plan in one pass over packed tokens, and returns its tokens at once."""

    def __init__(
        self,
        model: Any,
        blocks: int,
        block_size: int,
        routing: RoutingShape | None = None,
        *,
        rounds_kv: bool = False,
        pack: bool = True,
    ) -> None:
        """Create a runner. With `rounds_kv`, keys and values are rounded to FP8, and stored in the model's dtype.

        Without `pack`, layers are computed from the weights where they lie, without packed copies.
        """
        self.prefill_chunk = 512
        self.gather = 0
        self.overlaps = False
        self.timings = Timings()
        self._model = model
        self._cache = KVCache(blocks, block_size)
        self._rounds_kv = rounds_kv
        self._routing = routing
        self._device: torch.device = next(model.parameters()).device
        self._packed = pack_linears(model) if pack else None

    @torch.inference_mode()
    def run(self, plan: StepPlan, version: int) -> list[Sampled]:
        """Compute the plan's chunks. Return a token for each sequence whose last token is among them."""
        started = time.perf_counter()
        self._cache.copy(plan.copies)
        context = _PagedContext(self._cache, plan.chunks, self._device, rounds=self._rounds_kv)
        chunks = context.rows
        ends = np.cumsum([chunk.count for chunk in chunks]) - 1
        sampled = [(chunk.sequence, int(end)) for chunk, end in zip(chunks, ends, strict=True) if chunk.samples]
        # A pass that samples nothing still projects one token, because some models take an empty selection as "all".
        keep = torch.tensor([end for _, end in sampled] or [0], device=self._device)
        ids = np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]], np.int64)
        positions = np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])
        recorder = RoutingRecorder(self._routing, len(ids), self._device) if self._routing else None
        products = small_products() if self._packed is not None else nullcontext()
        with recording(recorder), attending(context), products:
            logits = self._model(
                input_ids=torch.from_numpy(ids).to(self._device)[None],
                position_ids=torch.from_numpy(positions).to(self._device)[None],
                use_cache=False,
                logits_to_keep=keep,
            ).logits[0]
        new: list[Sampled] = []
        if sampled:
            sequences = [sequence for sequence, _ in sampled]
            drawn = draw(logits, [s.sampling for s in sequences], [len(s.tokens) for s in sequences])
            routing = None if recorder is None else recorder.chosen[keep].cpu().numpy()
            for row, sequence in enumerate(sequences):
                logprob, kept = float(drawn.logprobs[row]), drawn.kept[row]
                new.append(
                    Sampled(
                        sequence,
                        [int(drawn.tokens[row])],
                        [logprob],
                        [version],
                        math.isfinite(logprob),
                        None if kept is None else [kept],
                        None if routing is None else [routing[row]],
                    )
                )
        self.timings.steps += 1
        self.timings.host_seconds += time.perf_counter() - started
        return new

    @torch.inference_mode()
    def clear(self, blocks: Sequence[int]) -> None:
        """See `Runner.clear`. Stale slots are read with weight 0, so they must be finite."""
        self._cache.clear(blocks)

    @torch.inference_mode()
    def score(self, token_ids: Int32Array, *, again: bool = False) -> Arriving:
        """See `Runner.score`. There is nothing to prepare."""
        ids = torch.from_numpy(np.array(token_ids, np.int64)).to(self._device)
        return Arriving(score_ids(self._model, ids))

    @torch.inference_mode()
    def score_likeliest(self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int) -> Arriving:
        """See `Runner.score_likeliest`."""
        return Arriving(likeliest_of(self._model, token_ids, temperatures, k, vocabulary, self._device))


def likeliest_of(
    model: Any, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int, device: torch.device
) -> torch.Tensor:
    """Return the result of `read_likeliest` for every token but the first, [n - 1, 2 + 2 k]."""
    ids = torch.from_numpy(np.array(token_ids, np.int64)).to(device)
    if len(ids) < 2:
        return torch.zeros(0, 2 + 2 * k, device=device)
    heat = torch.from_numpy(np.array(temperatures[1:], np.float32)).to(device)
    return read_likeliest(sequence_logits(model, ids), ids[1:], heat, k, vocabulary)


def sequence_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits from which every token but the first of n tokens would be drawn, [n - 1, V]."""
    positions = torch.arange(len(ids) - 1, device=ids.device)
    with attending(_DenseContext()):
        logits: torch.Tensor = model(input_ids=ids[None, :-1], position_ids=positions[None], use_cache=False).logits[0]
    return logits


def score_ids(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of every token but the first of n, [n - 1]. `ids` must be on the model's device."""
    if len(ids) < 2:
        return torch.zeros(0, device=ids.device)
    logits = sequence_logits(model, ids).float()
    scored: torch.Tensor = logits.gather(1, ids[1:, None])[:, 0] - logits.logsumexp(-1)
    return scored


class KVCache:
    """The keys and values of each layer, `[blocks, block_size, heads, head size]`.

    A layer is allocated at its first write.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the keys and values (`[T, heads, head size]`) of T tokens in these slots."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        for store, new in zip(self._layers[layer], (key, value), strict=True):
            store.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values in these blocks, `[rows, tokens, heads, head size]`.

        `blocks` lists the blocks of all rows in order, and each row has equally many blocks.
        """
        keys, values = (store.index_select(0, blocks) for store in self._layers[layer])
        return keys.view(rows, -1, *keys.shape[2:]), values.view(rows, -1, *values.shape[2:])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks. Stale slots are read with weight 0, so they may hold any finite number, but not NaN."""
        for stores in self._layers.values():
            for store in stores:
                store[torch.tensor(blocks, dtype=torch.long, device=store.device)] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(from, to)`, in all layers. Every source is read before any target is written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).unbind(1)
        for stores in self._layers.values():
            for store in stores:
                store.index_copy_(0, targets.to(store.device), store.index_select(0, sources.to(store.device)))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.blocks, self.block_size, *like.shape[1:])
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Zeroed, because padding is read with weight 0. numpy zeroes with calloc, which does not touch the memory, and
        # most of a large cache is never used.
        zeros = torch.from_numpy(np.zeros(math.prod(shape) * like.element_size(), np.uint8))
        return zeros.view(like.dtype).view(shape)


def bands(widths: Sequence[int], cost: float) -> list[tuple[int, int]]:
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


class _PagedContext:
    """An attention context that writes new keys and values to the cache, then attends over each sequence's blocks."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk], device: torch.device, *, rounds: bool = False) -> None:
        """Attend over these chunks. With `rounds`, keys and values are rounded to FP8 first."""
        self._rounds = rounds
        singles = sorted((c for c in chunks if c.count == 1), key=lambda c: c.start)
        self.rows = singles + [c for c in chunks if c.count > 1]
        """The chunks in the order of the packed row."""
        self._cache = cache
        self._device = device
        self._singles = len(singles)
        size = cache.block_size
        self._bands = bands([c.start // size + 1 for c in singles], BAND_TOKENS / size)
        slots = [
            chunk.sequence.blocks[position // size] * size + position % size
            for chunk in self.rows
            for position in range(chunk.start, chunk.start + chunk.count)
        ]
        self._slots = self._index(np.array(slots, np.int64))
        self._views: dict[tuple[int, int, int | None, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._rounds:
            call = replace(call, key=through_fp8(call.key), value=through_fp8(call.value))
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
            blocks, bias = self._view(first, end, call)
            keys, values = self._cache.read(call.layer, blocks, end - first)
            out = _attention(query[first:end], keys.transpose(1, 2), values.transpose(1, 2), bias, call, sinks)
            parts.append(out.reshape(end - first, heads, -1))
        return parts

    def _attend_chunk(self, call: AttentionCall, row: int, offset: int) -> torch.Tensor:
        chunk = self.rows[row]
        query = call.query[0, :, offset : offset + chunk.count]
        if chunk.start == 0:
            key, value = (x[0, :, offset : offset + chunk.count] for x in (call.key, call.value))
            return _attend_alone(query, key, value, call)
        blocks, bias = self._view(row, row + 1, call)
        keys, values = self._cache.read(call.layer, blocks, 1)
        return _attend_grouped(query, keys[0].transpose(0, 1), values[0].transpose(0, 1), bias, call)

    def _view(self, first: int, end: int, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks whose keys these rows see, and a bias for every key (0 or minus infinity).

        The rows must have equally many tokens.
        """
        cached = (first, end, call.window, call.query.dtype)
        if cached in self._views:
            return self._views[cached]
        chunks, window = self.rows[first:end], call.window
        size = self._cache.block_size
        # Blocks that lie entirely before the window are not read.
        begins = [0 if window is None else max(0, c.start - window + 1) // size for c in chunks]
        ends = [(c.start + c.count - 1) // size for c in chunks]
        width = max(b - a + 1 for a, b in zip(begins, ends, strict=True))
        table = np.zeros((len(chunks), width), np.int64)
        for row, (chunk, a, b) in enumerate(zip(chunks, begins, ends, strict=True)):
            table[row, : b - a + 1] = chunk.sequence.blocks[a : b + 1]
            # Padding reads the sequence's own last block. A foreign block could hold numbers that are not finite.
            table[row, b - a + 1 :] = chunk.sequence.blocks[b]
        keys = np.array(begins)[:, None] * size + np.arange(width * size)
        queries = np.array([c.start for c in chunks])[:, None] + np.arange(chunks[0].count)
        bias = _bias(self._index(queries)[:, :, None], self._index(keys)[:, None, :], window, call.query.dtype)
        self._views[cached] = self._index(table.reshape(-1)), bias[:, None]
        return self._views[cached]

    def _index(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class _DenseContext:
    """An attention context for one whole sequence without a cache."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return _attend_alone(call.query[0], call.key[0], call.value[0], call)[None]


def _attend_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> torch.Tensor:
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
    return _attention(query, key, value, bias, call, sinks).flatten(0, 1).transpose(0, 1)


def _attention(
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


def pack_linears(model: nn.Module) -> int | None:
    """Compute a model's linear layers from packed copies wherever no gradient is needed.

    Return the number of packed products, which several layers may share. Return None if layers cannot be packed: they
    must be in float32 on a CPU, in a torch with oneDNN. Copies follow their parameters automatically, except after
    writes that torch does not count (through `.data`), which nothing may do to a served model. The packed layers take
    their memory a second time.
    """
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    if not on_cpu or not torch._C._has_mkldnn:
        return None
    groups = [members for members in _groups(model) if sum(m.weight.numel() for m in members) >= SMALLEST_PACKED]
    for members in groups:
        _Product(members)  # the forward functions of the members hold it
    return len(groups)


@contextmanager
def small_products() -> Iterator[None]:
    """Compute small, unpacked products inside this context by BLAS without oneDNN, if torch has one thread.

    With more threads, BLAS threads would wait for each other whenever they share cores. Only for float32: oneDNN
    is the fast way for every other dtype.
    """
    global _inside, _before
    # The setting belongs to the whole process: the first thread to enter changes it, and the last to leave restores it.
    with _switch:
        if not _inside:
            _before = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(_before and torch.get_num_threads() > 1)
        _inside += 1
    try:
        yield
    finally:
        with _switch:
            _inside -= 1
            if not _inside:
                torch._C._set_mkldnn_enabled(_before)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield every plain linear layer once, grouped with the layers that read the same input."""
    taken: set[nn.Linear] = set()
    for parent in model.modules():
        for names in _SIBLINGS:
            members = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
            if len(members) == len(names) and _alike(members) and taken.isdisjoint(members):
                taken.update(members)
                yield members
    for module in model.modules():
        # A subclass may compute something else.
        if type(module) is nn.Linear and module not in taken:
            yield [module]


def _alike(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(m.in_features == first.in_features and (m.bias is None) == (first.bias is None) for m in linears)


class _Product:
    """Linear layers over one input, stacked into one packed weight.

    The first layer that is called computes all of them. The others return their part if called with the same input.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._parameters = [p for member in linears for p in (member.weight, member.bias) if p is not None]
        self._sizes = [member.out_features for member in linears]
        self._width = linears[0].in_features
        self._versions: list[int] = []
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        self._call: Any = torch.ops.mkldnn._linear_pointwise.default
        self._pack()
        for index, member in enumerate(self._linears):
            member.forward = self._forward_of(index)  # type: ignore[method-assign]

    @torch.no_grad()
    def _pack(self) -> None:
        # The counters are read before the copy: after a concurrent write the next call packs again.
        self._versions = [p._version for p in self._parameters]
        self._input, self._parts = None, {}
        weights: list[torch.Tensor] = [member.weight for member in self._linears]
        biases: list[torch.Tensor] = [member.bias for member in self._linears if member.bias is not None]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._weight = None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole.detach().contiguous())
        self._bias = torch.cat(biases) if biases else None

    def _forward_of(self, index: int) -> Any:
        member = self._linears[index]

        def forward(input: torch.Tensor) -> torch.Tensor:
            # A single row is a product of matrix and vector, for which the plain layout is the faster one.
            if torch.is_grad_enabled() or input.numel() <= self._width:
                return linear(input, member.weight, member.bias)
            return self._part(input, index)

        return forward

    def _part(self, source: torch.Tensor, index: int) -> torch.Tensor:
        if source is self._input and index in self._parts:
            part = self._parts.pop(index)
            if not self._parts:
                self._input = None
            return part
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                self._pack()
                break
        product: torch.Tensor = self._call(source, self._weight, self._bias, "none", [], "")
        if len(self._sizes) == 1:
            return product
        self._input, self._parts = source, dict(enumerate(product.split_with_sizes(self._sizes, -1)))
        return self._parts.pop(index)
