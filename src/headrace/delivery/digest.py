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
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from headrace.delivery.cores import share, threads_here
from headrace.delivery.digest_factors import BLOCK, HEAD, MASK, Sums, count_sums, fold, name_key, sum_keys, table
from headrace.delivery.digest_layout import SPAN, DigestLayout, DigestPiece, layout_of, readable, where
from headrace.delivery.plan import dtype_of

__all__ = [
    "BLOCK",
    "HEAD",
    "MASK",
    "Sums",
    "block_sums",
    "count_sums",
    "digest",
    "digest_as",
    "digest_of_sums",
    "name_key",
    "region_block_sums",
    "sum_keys",
    "table",
]

WORTH_THREADS = 8 * SPAN
"""Several threads share a digest of at least this many words; with fewer words, starting the threads takes longer."""
_BAND = 16 * BLOCK
"""The rows of a region are copied into a zeroed band of about this many elements of the whole tensor at a time."""


def digest(weights: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> int:
    """Return the digest of whole tensors, in any order: an unsigned 64-bit number.

    `threads` threads share the tensors in host memory. The default is one thread for every core that this process may
    use, up to `MOST_THREADS`: the work is short, and an engine's next token or a version's announcement waits for it.
    """
    total = 0
    on_host: list[tuple[str, torch.Tensor]] = []
    on_gpus: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        (on_gpus.setdefault(tensor.device, []) if tensor.is_cuda else on_host).append((name, tensor))
    for pairs in on_gpus.values():
        # Imported here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels.digest import DeviceDigest

        total += DeviceDigest.value(DeviceDigest(pairs).launch())
    # `held` keeps the tensors alive, because they are read by address.
    held = [(name, tensor if readable(tensor) else _readable_copy(tensor)) for name, tensor in on_host]
    layout = layout_of(tuple(where(name, tensor) for name, tensor in held))
    return (total + fold(_whole_sums(layout, threads or threads_here()), layout.keys)) & MASK


def digest_as(weights: Mapping[str, torch.Tensor], dtype: str) -> int:
    """Return the digest of whole tensors with floating-point tensors cast to this dtype, one tensor at a time."""
    wanted = dtype_of(dtype)
    cast = ((name, tensor.to(wanted) if tensor.is_floating_point() else tensor) for name, tensor in weights.items())
    return sum(digest([pair]) for pair in cast) & MASK


def digest_of_sums(sums: Mapping[tuple[str, str], Sums]) -> int:
    """Return the digest of whole tensors from their sums, which are given by (name, dtype)."""
    keys = [name_key(name, dtype) for name, dtype in sums]
    joined = np.concatenate([_no_sums(0), *sums.values()])[1:]
    return fold(joined, sum_keys(keys, [len(each) for each in sums.values()]))


def block_sums(part: torch.Tensor, numel: int | None = None, start: int = 0) -> Sums:
    """Return what `part` adds to the sums of a tensor of `numel` elements, of which it holds those from `start` on.

    The elements are in row-major order. Without `numel`, the part ends where the tensor ends.
    """
    return region_block_sums(part.reshape(-1), (start + part.numel() if numel is None else numel,), (start,))


def region_block_sums(part: torch.Tensor, full_shape: Sequence[int], offsets: Sequence[int]) -> Sums:
    """Return what `part`, a rectangle at `offsets` of a tensor of `full_shape`, adds to that tensor's sums.

    A part that is contiguous in the tensor costs no more than its own bytes. A part that is cut along an inner
    dimension into rows shorter than a block costs as much as the whole range from its first row to its last.
    """
    inside = [0 <= at <= at + mine <= full for at, mine, full in zip(offsets, part.shape, full_shape, strict=True)]
    if not all(inside):
        raise ValueError(f"a part of shape {tuple(part.shape)} at {tuple(offsets)} is not inside {tuple(full_shape)}")
    sums = _no_sums(math.prod(full_shape) * part.element_size())
    if part.numel():
        _add_region(sums, part.detach(), full_shape, offsets, 0)
    return sums


def _whole_sums(layout: DigestLayout, threads: int) -> Sums:
    """Return the sums of all tensors, one after another. The threads share the words of all tensors together."""
    found = [torch.empty(0, dtype=torch.int32)] * len(layout.pieces)
    numbered = list(enumerate(layout.pieces))
    share(functools.partial(_take, found), numbered, threads if layout.words >= WORTH_THREADS else 1, "digest")
    return layout.joined(found)


def _take(found: list[torch.Tensor], pieces: Iterator[tuple[int, DigestPiece]]) -> None:
    for number, piece in pieces:
        found[number] = piece.sums()


def _readable_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _no_sums(nbytes: int) -> Sums:
    return np.zeros(count_sums(nbytes), np.int32)


def _add_region(sums: Sums, part: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], base: int) -> None:
    """Add a region of a sub-tensor of this shape, whose first element is element `base` of the summed tensor."""
    cut = [d for d in range(part.dim()) if part.shape[d] != shape[d]]
    last = cut[-1] if cut else 0
    if any(0 < d < last for d in cut):
        # Only rows that are evenly spaced in the tensor can be handled together.
        for i, piece in enumerate(part, offsets[0]):
            _add_region(sums, piece, shape[1:], offsets[1:], base + i * math.prod(shape[1:]))
        return
    start = base + sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(offsets))
    rows = part.reshape(math.prod(part.shape[:last]), -1)
    for first, run in _runs(rows, math.prod(shape[last:])):
        byte = (start + first) * part.element_size()
        _add_words(sums, _words(run, byte % 4), byte // 4)


def _runs(rows: torch.Tensor, pitch: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows as runs of a tensor in which one row begins `pitch` elements after the previous row.

    Each run comes with the position of its first element. Short rows are joined to longer runs with zeros between.
    """
    width = rows.shape[1]
    height = 1 if width >= BLOCK else max(1, min(_BAND // pitch, len(rows)))
    band = rows.new_zeros(height, pitch) if height > 1 else rows
    for first in range(0, len(rows), height):
        held = rows[first : first + height]
        if height > 1:
            band[: len(held), :width] = held
            held = band[: len(held)]
        yield first * pitch, held.reshape(-1)[: (len(held) - 1) * pitch + width]


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
            sums[1 + block : 1 + block + rows] += torch.mv(torch.from_numpy(run.reshape(rows, BLOCK)), _whole()).numpy()
        done += rows * width
    if first < HEAD:
        # After the blocks, because these words are in a cache now.
        upper = words[: HEAD - first] >> 16
        sums[:1] += np.dot(upper, factors[BLOCK + first : BLOCK + first + len(upper)])


@functools.cache
def _whole() -> torch.Tensor:
    return torch.from_numpy(table()[:BLOCK])
