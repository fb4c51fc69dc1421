"""The digest of a whole model in one launch, without a word to the host: bit for bit that of `delivery.digest`.

A program takes one slice of the table T and the same slice of a few blocks of one tensor, so the table, four times as
wide as bfloat16 weights, is read once for many of them. The tensors must keep their addresses; their values may change
between two launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from headrace.delivery.digest import BLOCK, GOLDEN, MASK, MULTIPLIER, OFFSET, name_key, table, word_bytes
from headrace.delivery.plan import dtype_name

_Int64Array = npt.NDArray[np.int64]

TILE = 2048
"""Words of a block that a program takes."""
ROWS = 16
"""Blocks that a program takes, at most: so often is a piece of the table used once it is read."""
UNROLL = tl.constexpr(4)
"""Of them, those that it loads at a time."""

_FIELDS = 6
_ALIGNMENT = tl.constexpr(16)
"""Bytes that a thread loads at a time; the kernel is compiled for addresses that are multiples."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


# Triton reads a literal over 2^63 as no int64; the product of two int64 wraps to the same bits.
_GOLDEN = tl.constexpr(_signed(GOLDEN))
_MULTIPLIER = tl.constexpr(_signed(MULTIPLIER))
_OFFSET = tl.constexpr(OFFSET)
_LOW = tl.constexpr(0xFFFFFFFF)


Weights = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


class DeviceDigest:
    """The digest of tensors on one device, prepared once.

    Tensors that are not contiguous or not aligned, and those to be digested in another dtype, are copied to memory of
    the digest's own at each launch.
    """

    def __init__(self, weights: Weights, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """`dtypes` says as what a tensor is digested, where that is not its own dtype."""
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        devices = {tensor.device for _, tensor in pairs}
        if len(devices) > 1:
            raise ValueError(f"one digest over several devices: {', '.join(sorted(map(str, devices)))}")
        self._device = devices.pop() if devices else torch.device("cpu")
        self._weights: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        items = [np.empty((0, _FIELDS), np.int64)]
        for name, tensor in pairs:
            tensor = self._placed(tensor.detach(), (dtypes or {}).get(name, tensor.dtype))
            width = word_bytes(tensor.dtype)
            key = name_key(name, dtype_name(tensor.dtype))
            items.append(_items(tensor.data_ptr(), tensor.nbytes // width, width, key))
        self._items = torch.from_numpy(np.concatenate(items)).to(self._device)
        self._table = table(self._device)

    @torch.no_grad()
    def launch(self) -> torch.Tensor:
        """Enqueue the digest of what the tensors hold on the current stream; its result is for `value`."""
        for copy, tensor in self._copies:
            copy.copy_(tensor)
        sums = torch.empty(len(self._items), dtype=torch.int64, device=self._device)
        if len(sums):
            with torch.cuda.device_of(sums):
                _digest[(len(sums),)](self._items, self._table, sums, TILE, BLOCK, ROWS, _FIELDS, num_warps=4)
        return sums.sum().view(1)

    @staticmethod
    def value(launched: torch.Tensor) -> int:
        """The unsigned digest; waits for the current stream."""
        return int(launched.item()) & MASK

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Where the kernel reads this tensor: in place if it can."""
        if tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT.value == 0:
            self._weights.append(tensor)
            return tensor
        copy = torch.empty(tensor.shape, dtype=dtype, device=self._device)
        self._copies.append((copy, tensor))
        return copy


def _items(address: int, words: int, width: int, key: int) -> _Int64Array:
    """What the programs over one tensor do, a row each.

    Address of the first word, rows that are whole, words in the row after them, key of the first block before it is
    mixed, place of the slice in a block, bytes of a word.
    """
    firsts = np.arange(0, -(-words // BLOCK), ROWS, dtype=np.int64)
    places = np.arange(0, min(words, BLOCK), TILE, dtype=np.int64)
    first, place = np.repeat(firsts, len(places)), np.tile(places, len(firsts))
    # A last group of one block may end before the last slices.
    first, place = first[first * BLOCK + place < words], place[first * BLOCK + place < words]
    start = first * BLOCK + place
    left = words - start
    whole = np.clip((left - TILE) // BLOCK + 1, 0, ROWS)
    rest = np.where(whole < ROWS, np.clip(left - whole * BLOCK, 0, TILE), 0)
    keys = (np.uint64(key) + first.astype(np.uint64) * np.uint64(GOLDEN)).view(np.int64)
    fields = [address + start * width, whole, rest, keys, place, np.full_like(start, width)]
    return np.stack(fields, axis=1).astype(np.int64)


@triton.jit
def _mix(value):
    value = (value ^ ((value >> 32) & _LOW)) * _MULTIPLIER
    value = (value ^ ((value >> 32) & _LOW)) * _MULTIPLIER
    return value ^ ((value >> 32) & _LOW)


@triton.jit
def _rows(address, whole, rest, key, WORD: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Per place in the slice, the sum over blocks of the block's key times (bits + OFFSET)."""
    # The hint lets a thread load several words at a time.
    words = tl.multiple_of(address.to(tl.pointer_type(WORD)), _ALIGNMENT)
    lanes = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int64)
    after = key + whole * _GOLDEN
    for first in range(0, ROWS, UNROLL):
        if first < whole:
            for step in tl.static_range(UNROLL):
                # A row is masked as one: only under a mask that differs from word to word are words loaded one by one.
                held = first + step < whole
                bits = tl.load(words + (first + step) * BLOCK + lanes, mask=held, other=0).to(tl.int64)
                total += tl.where(held, _mix(key) | 1, 0) * (bits + _OFFSET)
                key += _GOLDEN
    if rest > 0:
        inside = lanes < rest
        bits = tl.load(words + whole * BLOCK + lanes, mask=inside, other=0).to(tl.int64)
        total += tl.where(inside, (_mix(after) | 1) * (bits + _OFFSET), 0)
    return total


@triton.jit
def _digest(items, table, sums, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr):
    item = items + tl.program_id(0).to(tl.int64) * FIELDS
    address = tl.load(item)
    whole = tl.load(item + 1)
    rest = tl.load(item + 2)
    key = tl.load(item + 3)
    place = tl.multiple_of(tl.load(item + 4), TILE)
    width = tl.load(item + 5)
    if width == 2:
        total = _rows(address, whole, rest, key, tl.int16, TILE, BLOCK, ROWS)
    elif width == 4:
        total = _rows(address, whole, rest, key, tl.int32, TILE, BLOCK, ROWS)
    else:
        total = _rows(address, whole, rest, key, tl.int8, TILE, BLOCK, ROWS)
    factors = tl.load(table + place + tl.arange(0, TILE))
    tl.store(sums + tl.program_id(0), tl.sum(total * factors, axis=0))
