"""How the sums of a digest are computed: the factors of words and of sums, and the work of summing in host memory.

Factors are pure functions of positions, names and dtypes. The sums of whole tensors are computed in pieces that threads
can share. Exactly one piece computes each sum, so together the pieces read every word. A layout of pieces is made once
for each set of addresses. It reads tensors by address and does not keep them alive: its caller must hold the tensors.
"""

import ctypes
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.delivery.plan import dtype_name

Sums = npt.NDArray[np.int32]
"""The sums of one whole tensor: h, then r of every block. The sums of disjoint parts are added with wrap-around."""

BLOCK = 1 << 13
"""The number of words in a block. The table of factors fits into a first-level cache, and the sums take little memory
compared with the weights."""
HEAD = 1 << 11
"""The number of words at a tensor's beginning that count in `r` and, with their upper halves, also in `h`. Most norms
and biases are not longer than this."""
MASK = (1 << 64) - 1

SPAN = 128 * BLOCK
"""The number of words in a piece."""
_GATHERED = 32
"""The number of short runs that are multiplied together; this many fit into a second-level cache."""
_BAND = 16 * BLOCK
"""A region of short rows is copied into whole, zero-filled rows of the tensor: about this many elements at a time."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)


def name_key(name: str, dtype: str) -> int:
    """Return the key of a tensor's first block, before it is mixed."""
    return int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")


def sum_keys(keys: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return the factor of every sum, for tensors with these `name_key`s and numbers of sums, one after another."""
    counts = np.array(lengths, np.int64)
    places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    blocks = np.maximum(places - 1, 0).astype(np.uint64)
    mixed = _mix(np.repeat(np.array(keys, np.uint64), counts) + blocks * _GOLDEN) | np.uint64(1)
    # h and r(0) form one 64-bit number, h in its upper half, with one factor: neither can cancel the other.
    return mixed << np.where(places == 0, 32, 0).astype(np.uint64)


def fold(sums: Sums, keys: npt.NDArray[np.uint64]) -> int:
    """Return the digest of tensors from their sums and the sums' factors, both one after another."""
    return int((sums.view(np.uint32).astype(np.uint64) * keys).sum())


def count_sums(nbytes: int) -> int:
    """Return the number of sums of a tensor with `nbytes` bytes."""
    return 1 + -(-nbytes // (4 * BLOCK))


@functools.cache
def table() -> Sums:
    """Return the factors T, then U, as signed words."""
    joined = np.concatenate([_odd_words(BLOCK, 1), _odd_words(HEAD, 1 + BLOCK)])
    return joined.astype(np.uint32).view(np.int32)


def _odd_words(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return `count` words: the low bits are the odd numbers below 2 * count in random order, the high bits random."""
    noise = _mix(np.arange(seed, seed + count).astype(np.uint64) * _GOLDEN)
    low = 2 * np.argsort(noise).astype(np.uint64) + np.uint64(1)
    return (_mix(noise) >> np.uint64(32)) // np.uint64(2 * count) * np.uint64(2 * count) + low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Map 64-bit numbers one to one, so that neighbouring numbers get unrelated values."""
    values = (values ^ values >> np.uint64(32)) * _MULTIPLIER
    values = (values ^ values >> np.uint64(32)) * _MULTIPLIER
    return values ^ values >> np.uint64(32)


class _Where(NamedTuple):
    """The name, dtype and address of a contiguous tensor whose address is a multiple of 4."""

    name: str
    dtype: str
    address: int
    nbytes: int


class DigestPiece(NamedTuple):
    """A piece of the digest work that one thread does."""

    end: int
    """The address after the last byte that this piece reads."""
    sums: Callable[[], torch.Tensor]
    """The work itself: it returns the sums of this piece."""
    places: npt.NDArray[np.int64]
    """The positions of these sums among all sums."""


class DigestLayout(NamedTuple):
    """All pieces of the work on a set of tensors."""

    pieces: tuple[DigestPiece, ...]
    keys: npt.NDArray[np.uint64]
    """The factor of each sum, in the order of the tensors."""
    words: int

    def digest(self, found: Sequence[torch.Tensor]) -> int:
        """Return the digest from the results of the pieces, which are in the order of the pieces."""
        sums = np.zeros(len(self.keys), np.int32)
        if found:
            sums[np.concatenate([piece.places for piece in self.pieces])] = torch.cat(list(found)).numpy()
        return fold(sums, self.keys)


def where(name: str, tensor: torch.Tensor) -> _Where:
    """Describe a contiguous tensor whose address is a multiple of 4."""
    return _Where(name, dtype_name(tensor.dtype), tensor.data_ptr(), tensor.nbytes)


@functools.lru_cache(maxsize=8)
def layout_of(tensors: tuple[_Where, ...]) -> DigestLayout:
    """Return the layout for these tensors. A few layouts are cached, because every version uses the same places."""
    lengths = [count_sums(each.nbytes) for each in tensors]
    starts = list(itertools.accumulate(lengths, initial=0))
    pieces = [piece for each, start in zip(tensors, starts, strict=False) for piece in _whole_blocks(each, start)]
    whole = [each.nbytes // (4 * BLOCK) for each in tensors]
    ends = [
        _Run(each.address + 4 * BLOCK * blocks, each.nbytes - 4 * BLOCK * blocks, start + 1 + blocks)
        for each, start, blocks in zip(tensors, starts, whole, strict=False)
    ]
    heads = [
        _Run(each.address, min(each.nbytes, 4 * HEAD), start) for each, start in zip(tensors, starts, strict=False)
    ]
    factors = torch.from_numpy(table())
    pieces += [*_gathered(ends, factors[:BLOCK], 0), *_gathered(heads, factors[BLOCK:], 16)]
    keys = sum_keys([name_key(each.name, each.dtype) for each in tensors], lengths)
    return DigestLayout(tuple(pieces), keys, sum(each.nbytes for each in tensors) // 4)


class _Run(NamedTuple):
    """A run of fewer bytes than a block has, and the position of its sum among all sums."""

    address: int
    nbytes: int
    place: int


def _whole_blocks(tensor: _Where, start: int) -> Iterator[DigestPiece]:
    factors, rows = torch.from_numpy(table()[:BLOCK]), tensor.nbytes // (4 * BLOCK)
    for first in range(0, rows, SPAN // BLOCK):
        count = min(SPAN // BLOCK, rows - first)
        address = tensor.address + 4 * BLOCK * first
        # torch.mv is vectorised, which numpy's integer product is not.
        product = functools.partial(torch.mv, _words_at(address, count * BLOCK).view(count, BLOCK), factors)
        yield DigestPiece(address + 4 * BLOCK * count, product, np.arange(start + 1 + first, start + 1 + first + count))


def _words_at(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(memoryview((ctypes.c_int32 * count).from_address(address)), np.int32))


def _gathered(runs: Sequence[_Run], factors: torch.Tensor, shift: int) -> Iterator[DigestPiece]:
    """Yield pieces of many short runs each, because a call for a single run costs more than its computation."""
    some = [run for run in runs if run.nbytes]
    for first in range(0, len(some), _GATHERED):
        group = some[first : first + _GATHERED]
        words = [_words_at(run.address, run.nbytes // 4) for run in group]
        # Runs that do not end with a whole word are copied, and the last word is padded in the copy.
        rests = [(number, run) for number, run in enumerate(group) if run.nbytes % 4]
        yield DigestPiece(
            max(run.address + run.nbytes for run in group),
            functools.partial(_multiplied, words, rests, factors, shift),
            np.array([run.place for run in group]),
        )


def _multiplied(
    words: Sequence[torch.Tensor], rests: Sequence[tuple[int, _Run]], factors: torch.Tensor, shift: int
) -> torch.Tensor:
    """Return the sums of these runs; the first word of each run has the first factor."""
    padded = list(words)
    for number, run in rests:
        padded[number] = torch.zeros(-(-run.nbytes // 4), dtype=torch.int32)
        ctypes.memmove(padded[number].data_ptr(), run.address, run.nbytes)
    # One call for all runs, because only one of the threads can run Python code at a time.
    rows = pad_sequence(padded, batch_first=True)
    if shift:
        rows >>= shift
    return torch.mv(rows, factors[: rows.shape[1]])


def region_block_sums(part: torch.Tensor, full_shape: Sequence[int], offsets: Sequence[int]) -> Sums:
    """Return what `part`, a rectangle at `offsets` of a tensor of `full_shape`, adds to that tensor's sums.

    A part that is contiguous in the tensor costs no more than its own bytes. A part that is cut along an inner
    dimension into rows shorter than a block costs as much as the whole rows of the tensor.
    """
    inside = [0 <= at <= at + mine <= full for at, mine, full in zip(offsets, part.shape, full_shape, strict=True)]
    if not all(inside):
        raise ValueError(f"a part of shape {tuple(part.shape)} at {tuple(offsets)} is not inside {tuple(full_shape)}")
    sums = np.zeros(count_sums(math.prod(full_shape) * part.element_size()), np.int32)
    if part.numel():
        _add_region(sums, part.detach(), full_shape, offsets, 0)
    return sums


def _add_region(sums: Sums, part: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], base: int) -> None:
    """Add a region of a sub-tensor of this shape, whose first element is element `base` of the summed tensor."""
    pitch = math.prod(shape[1:])
    if part.shape[1:] == tuple(shape[1:]):
        byte = (base + offsets[0] * pitch if shape else base) * part.element_size()
        _add_words(sums, _words(part, byte % 4), byte // 4)
    elif part[0].numel() >= BLOCK:
        for row, piece in enumerate(part, offsets[0]):
            _add_region(sums, piece, shape[1:], offsets[1:], base + row * pitch)
    else:
        # Short rows are added together, with zeros where other parts are.
        height = max(1, min(_BAND // pitch, len(part)))
        band = part.new_zeros(height, *shape[1:])
        inside = [slice(at, at + length) for at, length in zip(offsets[1:], part.shape[1:], strict=True)]
        for first in range(0, len(part), height):
            held = part[first : first + height]
            band[: len(held), *inside] = held
            byte = (base + (offsets[0] + first) * pitch) * part.element_size()
            _add_words(sums, _words(band[: len(held)], byte % 4), byte // 4)


def _words(run: torch.Tensor, place: int) -> Sums:
    """Return the bytes of a tensor in row-major order as words; the bytes begin at byte `place` of the first word."""
    flat = run if run.dim() and run.is_contiguous() else run.reshape(-1)
    raw = flat.view(torch.uint8).numpy(force=run.is_cuda).reshape(-1)
    if place == 0 and len(raw) % 4 == 0:
        words = raw.view(np.int32)
        if words.flags.aligned:
            return words
    words = np.zeros(-(-(place + len(raw)) // 4), np.int32)
    words.view(np.uint8)[place : place + len(raw)] = raw
    return words


def _add_words(sums: Sums, words: Sums, first: int) -> None:
    """Add words of the tensor, the first of which has the index `first`."""
    factors, done, count = table(), 0, len(words)
    while done < count:
        # Whole blocks are added together. The ends of a run that starts or stops inside a block are added separately.
        block, place = divmod(first + done, BLOCK)
        width = min(BLOCK - place, count - done)
        rows = (count - done) // BLOCK if width == BLOCK else 1
        run = words[done : done + rows * width]
        if rows == 1:
            sums[1 + block : 2 + block] += np.dot(run, factors[place : place + width])
        else:
            # torch.mv is vectorised, which numpy's integer product is not; but each call costs more.
            blocks = torch.from_numpy(run.reshape(rows, BLOCK))
            sums[1 + block : 1 + block + rows] += torch.mv(blocks, torch.from_numpy(factors[:BLOCK])).numpy()
        done += rows * width
    if first < HEAD:
        # After the blocks, because these words are in a cache now.
        upper = words[: HEAD - first] >> 16
        sums[:1] += np.dot(upper, factors[BLOCK + first : BLOCK + first + len(upper)])
