"""One number for a set of weights, the same however they are cut, ordered, packed or placed.

A tensor's bytes are read as 32-bit words w, the last one padded with zeros, in blocks of BLOCK words. All sums are
linear in the bits, so those of disjoint parts of a tensor, cut anywhere, add up to those of the whole modulo 2^32:

    r(b)   = sum over block b of T[i % BLOCK] * w[i]             modulo 2^32, T odd
    h      = sum over i < HEAD of U[i] * (w[i] >> 16)            modulo 2^32, U odd, the shift with its sign
    digest = sum over tensors of 2^32 * A(0) * h
             and over their blocks of A(b) * r(b)                modulo 2^64, A odd, of (name, dtype, b)

What it sees, and what not:

- A change within one word always shows: one element of up to 32 bits, one flipped bit of any.
- Two exchanged words of one block always show if they differ in their lowest 18 bits, and among a tensor's first HEAD
  words whatever they differ in: the low bits of T and U are permutations.
- A random change inside one block hides with a probability of 2^-32. If it leaves the lowest n bits of all words as
  they were, only 32 - n bits show it: 2^-16 where of bfloat16 weights only odd elements change. An even number of
  flips of the words' topmost bits (the signs of float32) inside one block always hides. The head is better off: h
  sees upper halves with full factors, so small tensors, and whole ones that change their signs, show.
- Over k blocks these probabilities multiply, until changes in several blocks or heads cancel each other by chance:
  with a probability of 2^-64, or 2^-(64 - n) if all changes to the sums are multiples of 2^n.
- Zeros add nothing: which tensors there are, and how long, is what the plan's own digest proves.

It guards against mistakes, not against an attacker. It costs one 32-bit multiplication per word.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.delivery.cores import share, threads_here
from headrace.delivery.plan import dtype_name, dtype_of

Sums = npt.NDArray[np.int32]
"""h, then r of every block of the whole tensor. Those of disjoint parts are added with wrap-around."""

BLOCK = 1 << 13
"""Words under one table: it stays in a first-level cache, and the sums are small beside the weights."""
HEAD = 1 << 11
"""Words at a tensor's beginning whose upper halves count twice: all of most norms and biases."""
MASK = (1 << 64) - 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)
SPAN = 128 * BLOCK
"""Words that a thread takes at a time."""
_WORTH_THREADS = 8 * SPAN
_GATHERED = 32
"""Short runs that are multiplied at a time: so many stay in a second-level cache."""
_BAND = 16 * BLOCK
"""Elements of a larger tensor that are laid out at a time around the rows of a region."""


def digest(weights: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> int:
    """The digest of whole tensors, in any order: an unsigned 64-bit number.

    `threads` is for those in host memory; without it, one for every core that this process may use, up to
    `MOST_THREADS`: it is a moment of work, on which an engine's next token or a version's announcement waits.
    """
    total = 0
    on_host: list[tuple[str, torch.Tensor]] = []
    on_gpus: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        (on_gpus.setdefault(tensor.device, []) if tensor.is_cuda else on_host).append((name, tensor))
    for pairs in on_gpus.values():
        # Late: only where there is a GPU is there a need for Triton.
        from headrace.delivery.digest_kernel import DeviceDigest

        total += DeviceDigest.value(DeviceDigest(pairs).launch())
    lengths = [count_sums(tensor.nbytes) for _, tensor in on_host]
    sums = _whole_sums([tensor for _, tensor in on_host], lengths, threads or threads_here())
    keys = [name_key(name, dtype_name(tensor.dtype)) for name, tensor in on_host]
    return (total + fold(keys, lengths, sums)) & MASK


def digest_as(weights: Mapping[str, torch.Tensor], dtype: str) -> int:
    """The digest of whole tensors whose floating ones are cast to this dtype, one at a time."""
    wanted = dtype_of(dtype)
    cast = ((name, tensor.to(wanted) if tensor.is_floating_point() else tensor) for name, tensor in weights.items())
    return sum(digest([pair]) for pair in cast) & MASK


def digest_of_sums(sums: Mapping[tuple[str, str], Sums]) -> int:
    """The digest of whole tensors whose sums these are, by (name, dtype)."""
    keys = [name_key(name, dtype) for name, dtype in sums]
    joined = np.concatenate([_no_sums(0), *sums.values()])[1:]
    return fold(keys, [len(each) for each in sums.values()], joined)


def block_sums(part: torch.Tensor, numel: int | None = None, start: int = 0) -> Sums:
    """What the elements `start ..` of a tensor of `numel` elements, here in row-major order, add to its sums.

    Without `numel` the part reaches to the tensor's end.
    """
    return region_block_sums(part.reshape(-1), (start + part.numel() if numel is None else numel,), (start,))


def region_block_sums(part: torch.Tensor, full_shape: Sequence[int], offsets: Sequence[int]) -> Sums:
    """What `part`, a rectangle at `offsets` of a tensor of `full_shape`, adds to that tensor's sums.

    A part that is one run of the tensor costs no more than its own bytes; one that is cut along an inner dimension into
    rows shorter than a block costs what the rows span.
    """
    inside = [0 <= at <= at + mine <= full for at, mine, full in zip(offsets, part.shape, full_shape, strict=True)]
    if not all(inside):
        raise ValueError(f"a part of shape {tuple(part.shape)} at {tuple(offsets)} is not inside {tuple(full_shape)}")
    sums = _no_sums(math.prod(full_shape) * part.element_size())
    if part.numel():
        _add_region(sums, part.detach(), full_shape, offsets, 0)
    return sums


@functools.lru_cache(maxsize=1 << 14)
def name_key(name: str, dtype: str) -> int:
    """The key of a tensor's first block, before it is mixed."""
    return int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")


def sum_keys(keys: Sequence[int], lengths: Sequence[int]) -> npt.NDArray[np.uint64]:
    """What every one of the sums counts, for tensors of these `name_key`s and numbers of sums, one after another."""
    counts = np.array(lengths, np.int64)
    places = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    blocks = np.maximum(places - 1, 0).astype(np.uint64)
    mixed = _mix(np.repeat(np.array(keys, np.uint64), counts) + blocks * _GOLDEN) | np.uint64(1)
    # h stands above r(0) in one 64-bit number: neither can hide what the other shows.
    return mixed << np.where(places == 0, 32, 0).astype(np.uint64)


def count_sums(nbytes: int) -> int:
    """How many sums a tensor of so many bytes has."""
    return 1 + -(-nbytes // (4 * BLOCK))


@functools.cache
def table() -> Sums:
    """T, then U, as signed words."""
    joined = np.concatenate([_odd_words(BLOCK, 1), _odd_words(HEAD, 1 + BLOCK)])
    return joined.astype(np.uint32).view(np.int32)


def _odd_words(count: int, seed: int) -> npt.NDArray[np.uint64]:
    """Random high bits over the odd numbers below 2 * count in random order."""
    noise = _mix(np.arange(seed, seed + count).astype(np.uint64) * _GOLDEN)
    low = 2 * np.argsort(noise).astype(np.uint64) + np.uint64(1)
    return (_mix(noise) >> np.uint64(32)) // np.uint64(2 * count) * np.uint64(2 * count) + low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of 64-bit numbers under which neighbours become strangers."""
    values = (values ^ values >> np.uint64(32)) * _MULTIPLIER
    values = (values ^ values >> np.uint64(32)) * _MULTIPLIER
    return values ^ values >> np.uint64(32)


def fold(keys: Sequence[int], lengths: Sequence[int], sums: Sums) -> int:
    """The digest of tensors with these keys, whose sums of these lengths lie one after another."""
    unsigned = sums.view(np.uint32).astype(np.uint64)
    return int((unsigned * sum_keys(keys, lengths)).sum())


Piece = tuple[int, Sums, int]
"""Where the sums of a tensor begin, a run of its words that starts with a block, and the first one's index."""


def _whole_sums(tensors: Sequence[torch.Tensor], lengths: Sequence[int], threads: int) -> Sums:
    """The sums of all, one after another; the threads share the words, whatever tensor they are of."""
    sums = np.zeros(sum(lengths), np.int32)
    starts = itertools.accumulate(lengths, initial=0)
    words = [(start, borrowed(tensor)) for start, tensor in zip(starts, tensors, strict=False)]
    total = sum(len(each) for _, each in words)
    if threads == 1 or total < _WORTH_THREADS:
        add_pieces(sums, ((start, each, 0) for start, each in words))
        return sums
    pieces: list[Piece] = [
        (start, each[first : first + SPAN], first) for start, each in words for first in range(0, len(each), SPAN)
    ]
    share(functools.partial(add_pieces, sums), pieces, threads, "digest")
    return sums


def add_pieces(sums: Sums, pieces: Iterable[Piece]) -> None:
    """Add pieces of which no two have words of one block."""
    factors = table()
    ends, heads = _Gather(sums, factors[:BLOCK]), _Gather(sums, factors[BLOCK:], shift=16)
    for start, words, first in pieces:
        rows, rest = divmod(len(words), BLOCK)
        block = start + 1 + first // BLOCK
        if rows:
            whole = torch.from_numpy(words[: rows * BLOCK].reshape(rows, BLOCK))
            sums[block : block + rows] = torch.mv(whole, _whole()).numpy()
        if rest:
            ends.add(words[rows * BLOCK :], block + rows)
        if not first and len(words):
            heads.add(words[:HEAD], start)
    ends.flush()
    heads.flush()


class _Gather:
    """Short runs of words, multiplied many at a time: a call costs more than what it computes for one of them."""

    def __init__(self, sums: Sums, factors: Sums, shift: int = 0) -> None:
        self._sums = sums
        self._factors = torch.from_numpy(factors)
        self._shift = shift
        self._rows = np.empty((_GATHERED, len(factors)), np.int32)
        self._places: list[int] = []

    def add(self, words: Sums, place: int) -> None:
        """What these words make is the sum at this place."""
        row = self._rows[len(self._places)]
        row[: len(words)] = words
        row[len(words) :] = 0
        self._places.append(place)
        if len(self._places) == _GATHERED:
            self.flush()

    def flush(self) -> None:
        """Write the sums of what was added."""
        held = self._rows[: len(self._places)]
        if self._shift:
            held >>= self._shift
        self._sums[self._places] = torch.mv(torch.from_numpy(held), self._factors).numpy()
        self._places.clear()


def _no_sums(nbytes: int) -> Sums:
    return np.zeros(count_sums(nbytes), np.int32)


def _add_region(sums: Sums, part: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], base: int) -> None:
    """Add a region of the tensor of this shape whose first element is element `base` of the one that is summed."""
    cut = [d for d in range(part.dim()) if part.shape[d] != shape[d]]
    last = cut[-1] if cut else 0
    if any(0 < d < last for d in cut):
        # Only rows of evenly spaced runs go together.
        for i, piece in enumerate(part, offsets[0]):
            _add_region(sums, piece, shape[1:], offsets[1:], base + i * math.prod(shape[1:]))
        return
    start = base + sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(offsets))
    rows = part.reshape(math.prod(part.shape[:last]), -1)
    for first, run in _runs(rows, math.prod(shape[last:])):
        byte = (start + first) * part.element_size()
        _add_words(sums, _words(run, byte % 4), byte // 4)


def _runs(rows: torch.Tensor, pitch: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows as runs of a tensor in which one begins `pitch` elements after another, short ones among zeros."""
    width = rows.shape[1]
    height = 1 if width >= BLOCK else max(1, min(_BAND // pitch, len(rows)))
    band = rows.new_zeros(height, pitch) if height > 1 else rows
    for first in range(0, len(rows), height):
        held = rows[first : first + height]
        if height > 1:
            band[: len(held), :width] = held
            held = band[: len(held)]
        yield first * pitch, held.reshape(-1)[: (len(held) - 1) * pitch + width]


def borrowed(tensor: torch.Tensor) -> Sums:
    """The words of a tensor that the caller keeps alive, in place if they can be read there."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if address % 4 or nbytes % 4 or not nbytes or not tensor.is_contiguous():
        return _words(tensor.detach(), 0)
    # By address: the ways through torch's views take ten times as long, and a model has hundreds of tensors.
    return np.frombuffer(memoryview((ctypes.c_int32 * (nbytes // 4)).from_address(address)), np.int32)


def _words(run: torch.Tensor, place: int) -> Sums:
    """The bytes of a tensor in row-major order as words, in the first of which they begin at byte `place`."""
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
    """Add the words from index `first` of the tensor on."""
    factors, done, count = table(), 0, len(words)
    while done < count:
        # Whole blocks go together; the ends of a run that starts or stops inside a block go alone.
        block, place = divmod(first + done, BLOCK)
        width = min(BLOCK - place, count - done)
        rows = (count - done) // BLOCK if width == BLOCK else 1
        run = words[done : done + rows * width]
        if rows == 1:
            sums[1 + block : 2 + block] += np.dot(run, factors[place : place + width])
        else:
            # Vectorised, which numpy's product of integers is not; but a call costs more.
            sums[1 + block : 1 + block + rows] += torch.mv(torch.from_numpy(run.reshape(rows, BLOCK)), _whole()).numpy()
        done += rows * width
    if first < HEAD:
        # After the blocks: now these words are in a cache.
        upper = words[: HEAD - first] >> 16
        sums[:1] += np.dot(upper, factors[BLOCK + first : BLOCK + first + len(upper)])


@functools.cache
def _whole() -> torch.Tensor:
    return torch.from_numpy(table()[:BLOCK])
