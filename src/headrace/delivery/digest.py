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
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch

from headrace.delivery.base import Entry
from headrace.delivery.copying import share, threads_here
from headrace.delivery.digest_sums import (
    MASK,
    SPAN,
    DigestLayout,
    DigestPiece,
    Sums,
    fold,
    layout_of,
    name_key,
    sum_keys,
    where,
)
from headrace.delivery.plan import dtype_of

WORTH_THREADS = 8 * SPAN
"""Several threads share a digest of at least this many words; with fewer words, starting the threads takes longer."""

_Numbered = tuple[int, DigestPiece]


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
    layout = layout_of(tuple(where(name, tensor) for name, tensor in on_host))
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
    return fold(joined, sum_keys(keys, [len(each) for each in sums.values()]))


class GrowingDigest:
    """The digest of tensors in one packed buffer, computed while the buffer fills from its beginning.

    A word is read only after it has arrived, and where it arrived. The result equals that of `digest` for the whole.
    Used by one thread, which must close it; helper threads do part of the work.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._layout: DigestLayout | None = None
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
        self._layout = layout_of(tuple(where(entry.name, weights[entry.name]) for entry in self._entries))
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
