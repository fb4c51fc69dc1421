"""Paged attention against float64 written out, for the tests of the kernels with and without a GPU.

Everything a kernel must not read is NaN: slots that are not written yet, blocks of nobody, table entries past a row's
end (which point to such a block), fresh memory for outputs and scratch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from headrace.engines.embedded.kernels.attention import choose_queries, paged_decode, paged_prefill, tiles_of
from headrace.engines.embedded.kernels.cache import write_cache
from headrace.models.attention import AttentionCall


@dataclass(frozen=True)
class Case:
    """Rows of a paged cache and how they are attended to."""

    lengths: tuple[int, ...]
    """Tokens of each row; 0 makes an idle entry of a decode."""
    kv_heads: int = 2
    group: int = 2
    size: int = 16
    value_size: int | None = None
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    """The dtype of the cache; None: that of the queries."""

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


class World:
    """Random keys and values of every row, and a cache of scattered blocks that holds the first few of them."""

    def __init__(self, case: Case, cached: tuple[int, ...], device: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case, self.device = case, device
        self.scaling = 0.7 * case.size**-0.5
        value_size = case.value_size or case.size
        self.keys_by_row = [self.random(n, case.kv_heads, case.size) for n in case.lengths]
        self.values_by_row = [self.random(n, case.kv_heads, value_size) for n in case.lengths]
        stored = case.stored or case.dtype
        if device == "cpu":
            # Triton's interpreter rounds some numbers to FP8 wrongly, so it gets numbers that need no rounding.
            self.keys_by_row = [row.to(stored).to(case.dtype) for row in self.keys_by_row]
            self.values_by_row = [row.to(stored).to(case.dtype) for row in self.values_by_row]
        self.sinks = self.random(case.heads) if case.sinks else None
        needed = [-(-n // case.block_size) for n in case.lengths]
        order = (torch.randperm(sum(needed) + 2) + 1).tolist()
        # Block 0 belongs to nobody, and so do the last two of the order.
        tables = torch.zeros(len(needed) + 1, max(needed) + 3, dtype=torch.int32)
        self.row_of = torch.randperm(len(needed) + 1)[: len(needed)].tolist()
        for row, count in zip(self.row_of, needed, strict=True):
            tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        self.tables = tables.to(device)
        shape = (sum(needed) + 3, case.kv_heads, case.block_size)
        # Filled in the dtype of the queries, because torch writes no FP8 numbers by index.
        self.keys = torch.full((*shape, case.size), float("nan"), dtype=case.dtype, device=device)
        self.values = torch.full((*shape, value_size), float("nan"), dtype=case.dtype, device=device)
        for row, count in enumerate(cached):
            blocks, at = self.places(row, 0, count)
            self.keys[blocks, :, at] = self.keys_by_row[row][:count]
            self.values[blocks, :, at] = self.values_by_row[row][:count]
        self.keys, self.values = self.keys.to(stored), self.values.to(stored)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(self.case.dtype).to(self.device)

    def places(self, row: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The blocks of the row's positions, and the offsets in them."""
        positions = torch.arange(start, end, device=self.device)
        return self.tables[self.row_of[row]].long()[positions // self.case.block_size], positions % self.case.block_size

    def index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def call(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> AttentionCall:
        """The call of a layer with these queries, keys and values, each `[T, H, D]`."""
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        return AttentionCall(0, query, key, value, self.scaling, self.case.window, self.case.softcap, self.sinks)

    def reference(self, row: int, query: torch.Tensor, start: int) -> torch.Tensor:
        """The exact attention of the row's queries, `[n, H, D]`, from this position on."""
        case = self.case
        end = start + len(query)
        stored = case.stored or case.dtype
        key = self.keys_by_row[row][:end].to(stored).double().repeat_interleave(case.group, 1)
        value = self.values_by_row[row][:end].to(stored).double().repeat_interleave(case.group, 1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * self.scaling
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        here = torch.arange(start, end, device=self.device)[:, None]
        there = torch.arange(end, device=self.device)
        hidden = there > here
        if case.window is not None:
            hidden |= there <= here - case.window
        weights = scores.masked_fill(hidden, float("-inf")).exp()
        below = weights.sum(-1)
        if self.sinks is not None:
            below = below + self.sinks.double().exp()[:, None]
        return torch.einsum("hqk,khd->qhd", weights, value) / below.T[..., None]


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """What `torch.empty` returns in here is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Within 1e-5 in float32; in half precision within 1e-2 of the largest output."""
    limit = 1e-5 if dtype == torch.float32 else 1e-2 * exact.abs().max().item()
    error = (found.double() - exact).abs().max().item()
    assert error <= limit, f"off by {error:.2e}, {limit:.2e} allowed"


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same `[T, H, D]`, in the memory of a `[1, H, T, D]`."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def check_decode(
    case: Case, *, device: str = "cpu", splits: int = 1, tile: int | None = None, seed: int = 0, **launch: int
) -> None:
    """The last token of every row: its output, and that the cache gained its key and value and changed nowhere else."""
    world = World(case, tuple(max(0, n - 1) for n in case.lengths), device, seed)
    batch = len(case.lengths)
    query = world.random(batch, case.heads, case.size)
    value_size = world.values.shape[3]
    key, value = world.random(batch, case.kv_heads, case.size), world.random(batch, case.kv_heads, value_size)
    keys_after, values_after = (cache.to(case.dtype, copy=True) for cache in (world.keys, world.values))
    for row, length in enumerate(case.lengths):
        if length:
            key[row], value[row] = world.keys_by_row[row][-1], world.values_by_row[row][-1]
            blocks, at = world.places(row, length - 1, length)
            keys_after[blocks, :, at], values_after[blocks, :, at] = key[row], value[row]
    call = world.call(heads_first(query), heads_first(key), heads_first(value))
    places = (world.index(world.row_of), world.index([n - 1 for n in case.lengths]))
    with fresh_memory_is_nan():
        out = paged_decode(call, world.keys, world.values, world.tables, *places, splits=splits, tile=tile, **launch)
    for row, length in enumerate(case.lengths):
        if length:
            assert_close(out[row : row + 1], world.reference(row, query[row : row + 1], length - 1), case.dtype)
        else:
            assert (out[row] == 0).all()
    for found, after in ((world.keys, keys_after), (world.values, values_after)):
        expected = after.to(found.dtype).to(case.dtype)
        torch.testing.assert_close(found.to(case.dtype), expected, rtol=0, atol=0, equal_nan=True)


def check_prefill(case: Case, counts: tuple[int, ...], *, device: str = "cpu", seed: int = 0, **launch: int) -> None:
    """The last so many tokens of every row, written by `write_cache` and packed, with padding after them."""
    starts = tuple(n - count for n, count in zip(case.lengths, counts, strict=True))
    world = World(case, starts, device, seed)
    padding, tokens = 3, sum(counts)
    query = world.random(tokens + padding, case.heads, case.size)
    parts = zip(world.keys_by_row, world.values_by_row, starts, strict=True)
    packed = [(key[start:], value[start:]) for key, value, start in parts]
    key, value = (torch.cat(column) for column in zip(*packed, strict=True))
    places = [world.places(row, starts[row], n) for row, n in enumerate(case.lengths)]
    slots = torch.cat([blocks * case.block_size + at for blocks, at in places])
    write_cache(heads_first(key), heads_first(value), world.keys, world.values, slots)
    offsets = torch.tensor([0, *counts]).cumsum(0).tolist()
    call = world.call(heads_first(query), heads_first(key), heads_first(value))
    cache = (world.keys, world.values, world.tables, world.index(world.row_of))
    queries = launch.pop("queries", 0) or choose_queries(max(counts), case.size, query.element_size())
    # Some that are none, as in a pass that is filled up.
    tiles = np.pad(tiles_of(np.array(counts), queries), ((0, 0), (1, 2)), constant_values=-1)
    chunks = (world.index(list(starts)), world.index(offsets), torch.tensor(tiles, device=device))
    if launch:
        launch |= {"num_warps": 4, "num_stages": 2}
    with fresh_memory_is_nan():
        out = paged_prefill(call, *cache, *chunks, queries=queries, **launch)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = slice(offsets[row], offsets[row] + count)
        if count:
            assert_close(out[mine], world.reference(row, query[mine], start), case.dtype)
    assert (out[tokens:] == 0).all()


def with_options(case: Case) -> list[Case]:
    """The case with every option that a model may want, one by one and together."""
    return [
        case,
        replace(case, window=1),
        replace(case, window=10_000),
        replace(case, softcap=1.5),
        replace(case, sinks=True),
        replace(case, window=21, softcap=2.0, sinks=True),
    ]
