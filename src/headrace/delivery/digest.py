"""The digest is one number for a set of weights; it does not depend on how they are cut, ordered, packed or placed.

A tensor's bytes are read as 32-bit words w, the last word padded with zeros, in blocks of BLOCK words. All sums are
linear in the bits. The sums of disjoint parts of a tensor, cut anywhere, therefore add up to the sums of the whole
tensor modulo 2^32:

    r(b)   = sum over block b of T[i % BLOCK] * w[i]             modulo 2^32, T odd
    h      = sum over i < HEAD of U[i] * (w[i] >> 16)            modulo 2^32, U odd, the shift with its sign
    digest = sum over tensors of 2^32 * A(0) * h
             and over their blocks of A(b) * r(b)                modulo 2^64, A odd, of (name, dtype, b)

Which changes it detects:

- A change within one word is always detected: one element of up to 32 bits, or one flipped bit of any element.
- Two exchanged words of one block are always detected if they differ in their lowest 18 bits. Among a tensor's first
  HEAD words they are detected whatever they differ in, because the low bits of T and U are permutations.
- A random change inside one block is missed with a probability of 2^-32. If it leaves the lowest n bits of all words
  unchanged, only 32 - n bits can show it: 2^-16 if only the odd elements of bfloat16 weights change. An even number of
  flips of the words' topmost bits (the signs of float32) inside one block is always missed. The head is protected
  better: h sees the upper halves with full factors, so it detects such changes in small tensors, and sign flips of
  whole tensors.
- For changes in k blocks these probabilities multiply, down to the probability that changes in several blocks or heads
  cancel by chance: 2^-64, or 2^-(64 - n) if all changes to the sums are multiples of 2^n.
- Zeros add nothing to the sums. Which tensors there are, and how long, is proved by the plan's own digest.

The digest protects against mistakes, not against an attacker. It costs one 32-bit multiplication per word.

In host memory, the sums of whole tensors are computed in pieces that threads can share. Exactly one piece computes each
sum, so together the pieces read every word. A layout of pieces is made once for each set of addresses. It reads tensors
by address and does not keep them alive: its caller must hold the tensors.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.delivery.base import Entry
from headrace.delivery.copying import share, threads_here
from headrace.delivery.plan import dtype_name, dtype_of

Sums = npt.NDArray[np.int32]
"""The sums of one whole tensor: h, then r of every block. The sums of disjoint parts are added with wrap-around."""

BLOCK = 1 << 13
"""The number of words in a block. The table of factors fits into a first-level cache, and the sums take little memory
compared with the weights."""
HEAD = 1 << 11
"""The number of words at a tensor's beginning whose upper halves count twice; it covers most norms and biases."""
MASK = (1 << 64) - 1

SPAN = 128 * BLOCK
"""The number of words in a piece."""
WORTH_THREADS = 8 * SPAN
"""Several threads share a digest of at least this many words; with fewer words, starting the threads takes longer."""
_GATHERED = 32
"""The number of short runs that are multiplied together; this many fit into a second-level cache."""
_BAND = 16 * BLOCK
"""The rows of a region are copied into a zeroed band of about this many elements of the whole tensor at a time."""

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


def _fold(sums: Sums, keys: npt.NDArray[np.uint64]) -> int:
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


_Numbered = tuple[int, DigestPiece]


class _Layout(NamedTuple):
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
        return _fold(sums, self.keys)


def _where(name: str, tensor: torch.Tensor) -> _Where:
    return _Where(name, dtype_name(tensor.dtype), tensor.data_ptr(), tensor.nbytes)


@functools.lru_cache(maxsize=8)
def layout_of(tensors: tuple[_Where, ...]) -> _Layout:
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
    return _Layout(tuple(pieces), keys, sum(each.nbytes for each in tensors) // 4)


class _Run(NamedTuple):
    """A run of fewer bytes than a block has, and the position of its sum among all sums."""

    address: int
    nbytes: int
    place: int


def _whole_blocks(tensor: _Where, start: int) -> Iterator[DigestPiece]:
    factors, rows = _block_factors(), tensor.nbytes // (4 * BLOCK)
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
            sums[1 + block : 1 + block + rows] += torch.mv(
                torch.from_numpy(run.reshape(rows, BLOCK)), _block_factors()
            ).numpy()
        done += rows * width
    if first < HEAD:
        # After the blocks, because these words are in a cache now.
        upper = words[: HEAD - first] >> 16
        sums[:1] += np.dot(upper, factors[BLOCK + first : BLOCK + first + len(upper)])


@functools.cache
def _block_factors() -> torch.Tensor:
    return torch.from_numpy(table()[:BLOCK])


def digest(weights: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> int:
    """Return the digest of whole tensors, in any order: an unsigned 64-bit number.

    `threads` threads share the tensors in host memory. The default is one thread for every core that this process may
    use, up to `MOST_THREADS`: the work is short, and an engine's next token or a version's announcement waits for it.
    """
    total = 0
    on_host: list[tuple[str, torch.Tensor]] = []
    on_gpus: defaultdict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        if tensor.is_cuda:
            on_gpus[tensor.device][name] = tensor
        else:
            on_host.append((name, _readable(tensor)))
    for tensors in on_gpus.values():
        # Imported here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels import DeviceDigest

        total += DeviceDigest.value(DeviceDigest(tensors).launch())
    # `on_host` keeps the tensors alive, because they are read by address.
    layout = layout_of(tuple(_where(name, tensor) for name, tensor in on_host))
    found = [torch.empty(0, dtype=torch.int32)] * len(layout.pieces)
    wanted = threads or threads_here()
    # The threads share the words of all tensors together.
    share(
        functools.partial(_take, found),
        list(enumerate(layout.pieces)),
        wanted if layout.words >= WORTH_THREADS else 1,
        "digest",
    )
    return (total + layout.digest(found)) & MASK


def digest_as(weights: Mapping[str, torch.Tensor], dtype: str) -> int:
    """Return the digest of whole tensors with floating-point tensors cast to this dtype, one tensor at a time."""
    wanted = dtype_of(dtype)
    cast = ((name, tensor.to(wanted) if tensor.is_floating_point() else tensor) for name, tensor in weights.items())
    return sum(digest([pair]) for pair in cast) & MASK


def digest_of_sums(sums: Mapping[tuple[str, str], Sums]) -> int:
    """Return the digest of whole tensors from their sums, which are given by (name, dtype)."""
    keys = [name_key(name, dtype) for name, dtype in sums]
    joined = np.concatenate([np.zeros(0, np.int32), *sums.values()])
    return _fold(joined, sum_keys(keys, [len(each) for each in sums.values()]))


class GrowingDigest:
    """The digest of tensors in one packed buffer, computed while the buffer fills from its beginning.

    A word is read only after it has arrived, and where it arrived. The result equals that of `digest` for the whole.
    Used by one thread, which must close it; helper threads do part of the work.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._layout: _Layout | None = None
        self._base = 0
        self._held: Mapping[str, torch.Tensor] = {}
        self._found: list[torch.Tensor] = []
        self._coming: deque[_Numbered] = deque()
        self._here: SimpleQueue[_Numbered | None] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._working: list[Future[None]] = []

    @property
    def begun(self) -> bool:
        """Whether `grown` was called at least once."""
        return self._layout is not None

    def grown(self, weights: Mapping[str, torch.Tensor], nbytes: int) -> None:
        """Report that the first `nbytes` packed bytes have arrived and do not change any more.

        `weights` are views of the whole buffer; every call must pass the same views.
        """
        if self._layout is None:
            self._begin(weights)
        while self._coming and self._coming[0][1].end - self._base <= nbytes:
            self._here.put(self._coming.popleft())

    def value(self) -> int:
        """Return the digest after all bytes have arrived; the calling thread helps with the remaining pieces."""
        assert self._layout is not None and not self._coming
        self._end()
        _take(self._found, iter(self._here.get, None))
        for one in self._working:
            one.result()
        return self._layout.digest(self._found)

    def close(self) -> None:
        """End the helper threads and release the weights. Idempotent."""
        if self._pool is not None:
            self._end()
            self._pool.shutdown(wait=True)
            self._pool = None
            self._held = {}

    def _begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._held = weights
        self._base = min(weights[entry.name].data_ptr() - entry.offset for entry in self._entries if entry.nbytes)
        self._layout = layout_of(tuple(_where(entry.name, weights[entry.name]) for entry in self._entries))
        numbered = enumerate(self._layout.pieces)
        self._coming = deque(sorted(numbered, key=lambda piece: piece[1].end))
        self._found = [torch.empty(0, dtype=torch.int32)] * len(self._coming)
        helpers = max(1, threads_here() - 1)
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="digest")
        self._working = [self._pool.submit(_take, self._found, iter(self._here.get, None)) for _ in range(helpers)]

    def _end(self) -> None:
        """Put one end marker into the queue for every helper thread, and one for the caller."""
        for _ in range(len(self._working) + 1):
            self._here.put(None)


def _take(found: list[torch.Tensor], pieces: Iterator[_Numbered]) -> None:
    for number, piece in pieces:
        found[number] = piece.sums()


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if its words can be read in place, and otherwise a copy of it."""
    if tensor.is_contiguous() and tensor.data_ptr() % 4 == 0:
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)
