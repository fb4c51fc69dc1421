"""The Triton kernels of delivery: the digest of a whole model and the copy of a whole model, one launch each.

The digest is bit for bit that of `delivery.digest`. The host does not wait for its launch. A program takes one slice of
the table and the same slice of several blocks of one tensor, so one read of the table (which is as wide as a block)
serves many blocks. Sums are added atomically: integers give the same sum in any order. The tensors must keep their
addresses; their values may change between two launches.

The copy has the bandwidth of one large copy. Torch fuses such copies too, but into launches with too few blocks to fill
a GPU. Here each program copies one run of words of one tensor, and one launch has the programs of all tensors.

Only code that runs on a GPU imports this module, and only when it needs it: Triton may not be installed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from headrace.delivery.copying import check_shape, copy_all
from headrace.delivery.digest_sums import BLOCK, HEAD, MASK, count_sums, name_key, sum_keys, table
from headrace.delivery.plan import dtype_name

_Int64Array = npt.NDArray[np.int64]

TILE = 512
"""The words of a block that a program takes: few enough that one warp sums them without waiting for other warps."""
ROWS = 32
"""The most blocks that a program takes, and so how often a slice of the table is used after it was read."""
UNROLL = tl.constexpr(4)
"""The number of blocks that a program loads at a time."""

COPY_TILE = 8192
"""The number of words that a program copies."""
COPY_WARPS = 8

_FIELDS = 6
_COPY_FIELDS = 3
_ALIGNMENT = tl.constexpr(16)
"""The bytes that a thread loads at a time. The kernels are compiled for addresses that are multiples of it."""


class DeviceDigest:
    """The digest of tensors on one device, prepared once.

    Tensors that are not contiguous, not aligned, not a whole number of words, or digested in another dtype are copied
    to separate memory at each launch.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Prepare the digest; `dtypes` gives the dtype to digest a tensor in, where it differs from its own."""
        devices = {tensor.device for tensor in weights.values()}
        if len(devices) > 1:
            raise ValueError(f"one digest over several devices: {', '.join(sorted(map(str, devices)))}")
        self._device = devices.pop() if devices else torch.device("cpu")
        self._weights: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        items = [np.empty((0, _FIELDS), np.int64)]
        keys: list[int] = []
        lengths: list[int] = []
        for name, tensor in weights.items():
            tensor = self._placed(tensor.detach(), (dtypes or {}).get(name, tensor.dtype))
            keys.append(name_key(name, dtype_name(tensor.dtype)))
            items.append(tensor_items(tensor.data_ptr(), -(-tensor.nbytes // 4), sum(lengths)))
            lengths.append(count_sums(tensor.nbytes))
        self._items = torch.from_numpy(np.concatenate(items)).to(self._device)
        self._keys = torch.from_numpy(sum_keys(keys, lengths).view(np.int64)).to(self._device)
        self._table = torch.from_numpy(table()).to(self._device)

    @torch.no_grad()
    def launch(self) -> torch.Tensor:
        """Enqueue the digest of the tensors' current values on the current stream; pass the result to `value`."""
        for copy, tensor in self._copies:
            copy.copy_(tensor)
        sums = torch.zeros(len(self._keys), dtype=torch.int32, device=self._device)
        if len(self._items):
            with torch.cuda.device_of(sums):
                _sum[(len(self._items),)](self._items, self._table, sums, TILE, BLOCK, ROWS, _FIELDS, num_warps=1)
        unsigned = sums.to(torch.int64).bitwise_and_(0xFFFFFFFF)
        return unsigned.mul_(self._keys).sum().view(1)

    @staticmethod
    def value(launched: torch.Tensor) -> int:
        """Return the unsigned digest; waits for the current stream."""
        return int(launched.item()) & MASK

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that the kernel reads: this one if possible, else a copy that each launch updates."""
        whole = tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT.value == 0 and tensor.nbytes % 4 == 0
        if tensor.dtype == dtype and whole:
            self._weights.append(tensor)
            return tensor
        nbytes = tensor.numel() * dtype.itemsize
        # The kernel reads the last word whole; the bytes of it that do not belong to the tensor stay zero.
        padded = torch.zeros(-(-nbytes // 4), dtype=torch.int32, device=self._device)
        copy = padded.view(torch.uint8)[:nbytes].view(dtype).view(tensor.shape)
        self._copies.append((copy, tensor))
        return copy


def tensor_items(address: int, words: int, slot: int) -> _Int64Array:
    """Return one row for each program over one tensor; the tensor's sums begin at `slot`.

    The fields of a row are: the address of the first word, the number of blocks whose slice is whole, the number of
    words in the slice of the block after them, the position of the first block's sum, the position of the slice in the
    table, and the bits by which words are shifted.
    """
    firsts = np.arange(0, -(-words // BLOCK), ROWS, dtype=np.int64)
    places = np.arange(0, min(words, BLOCK), TILE, dtype=np.int64)
    first, place = np.repeat(firsts, len(places)), np.tile(places, len(firsts))
    # If the last group has one block, the block may end before the last slices.
    first, place = first[first * BLOCK + place < words], place[first * BLOCK + place < words]
    start = first * BLOCK + place
    left = words - start
    whole = np.clip((left - TILE) // BLOCK + 1, 0, ROWS)
    rest = np.where(whole < ROWS, np.clip(left - whole * BLOCK, 0, TILE), 0)
    blocks = [address + start * 4, whole, rest, slot + 1 + first, place, np.zeros_like(start)]
    # The upper halves of the first words use the second part of the table.
    places = places[places < HEAD]
    left = np.minimum(words - places, TILE)
    one = left // TILE
    slots, shifts = np.full_like(places, slot), np.full_like(places, 16)
    head = [address + places * 4, one, left % TILE, slots, BLOCK + places, shifts]
    return np.concatenate([np.stack(blocks, axis=1), np.stack(head, axis=1)]).astype(np.int64)


@triton.jit
def _sum(items, table, sums, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FIELDS: tl.constexpr):
    item = items + tl.program_id(0).to(tl.int64) * FIELDS
    # The hint lets a thread load several words at a time.
    words = tl.multiple_of(tl.load(item).to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    whole = tl.load(item + 1)
    rest = tl.load(item + 2)
    into = sums + tl.load(item + 3)
    place = tl.multiple_of(tl.load(item + 4), TILE)
    shift = tl.load(item + 5).to(tl.int32)
    lanes = tl.arange(0, TILE)
    factors = tl.load(table + place + lanes)
    for first in range(0, ROWS, UNROLL):
        if first < whole:
            rows = first + tl.arange(0, UNROLL)
            # The mask is the same for a whole row. With a mask that differs from word to word, words would be loaded
            # one by one.
            held = rows < whole
            bits = tl.load(words + rows[:, None] * BLOCK + lanes[None, :], mask=held[:, None], other=0)
            tl.atomic_add(into + rows, tl.sum((bits >> shift) * factors[None, :], axis=1), mask=held, sem="relaxed")
    if rest > 0:
        bits = tl.load(words + whole * BLOCK + lanes, mask=lanes < rest, other=0)
        # In 64 bits, because Triton's interpreter does not wrap a scalar sum. Only the ends of tensors pay for it.
        total = tl.sum(((bits >> shift) * factors).to(tl.int64), axis=0)
        tl.atomic_add(into + whole, total.to(tl.int32), sem="relaxed")


class DeviceCopy:
    """A copy between tensors on one device, prepared once. Targets and sources must keep their addresses.

    Tensors that are not contiguous, not aligned, not a whole number of words, or cast are left to `copy_all`.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        """Prepare the copy; raises `DeliveryError` if a shape differs."""
        runs = [np.empty((0, _COPY_FIELDS), np.int64)]
        self._others: dict[str, torch.Tensor] = {}
        for name, target in targets.items():
            check_shape(name, target, sources[name])
            if _in_words(target, sources[name]):
                runs.append(tensor_runs(target.data_ptr(), sources[name].data_ptr(), target.nbytes // 4))
            else:
                self._others[name] = target
        self._sources = sources
        device = next((target.device for target in targets.values()), torch.device("cpu"))
        self.runs = torch.from_numpy(np.concatenate(runs)).to(device)
        """The table that the kernel reads. A recorded launch needs this table and nothing else of this object."""
        # A kernel is loaded at its first launch, and loading is not possible while a graph is recorded.
        _copy(torch.zeros_like(self.runs[:1]))

    @torch.no_grad()
    def launch(self) -> None:
        """Enqueue the copy on the current stream."""
        _copy(self.runs)
        copy_all(self._others, self._sources)


def _copy(runs: torch.Tensor) -> None:
    if len(runs):
        with torch.cuda.device_of(runs):
            _copy_runs[(len(runs),)](runs, COPY_TILE, _COPY_FIELDS, num_warps=COPY_WARPS)


def _in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    return (
        target.dtype == source.dtype
        and target.nbytes % 4 == 0
        and all(each.is_contiguous() and each.data_ptr() % _ALIGNMENT.value == 0 for each in (target, source))
    )


def tensor_runs(target: int, source: int, words: int) -> _Int64Array:
    """Return one row for each program over one tensor: target address, source address, number of words."""
    first = np.arange(0, words, COPY_TILE, dtype=np.int64)
    return np.stack([target + 4 * first, source + 4 * first, np.minimum(words - first, COPY_TILE)], axis=1)


@triton.jit
def _copy_runs(runs, TILE: tl.constexpr, FIELDS: tl.constexpr):
    run = runs + tl.program_id(0).to(tl.int64) * FIELDS
    # The alignment hints, and a run without a mask, let a thread copy several words at a time.
    target = tl.multiple_of(tl.load(run).to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    source = tl.multiple_of(tl.load(run + 1).to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    words = tl.load(run + 2)
    lanes = tl.arange(0, TILE)
    if words == TILE:
        tl.store(target + lanes, tl.load(source + lanes))
    else:
        tl.store(target + lanes, tl.load(source + lanes, mask=lanes < words), mask=lanes < words)
