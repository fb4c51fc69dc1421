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

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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


def digest(weights: Iterable[tuple[str, torch.Tensor]], threads: int | None = None) -> int:
    """Return the digest of whole tensors, in any order: an unsigned 64-bit number.

    `threads` threads share the tensors in host memory, by default `threads_here()`: an engine's next token or a
    version's announcement waits for the digest.
    """
    total = 0
    on_host: list[tuple[str, torch.Tensor]] = []
    on_gpus: defaultdict[torch.device, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in weights:
        if tensor.is_cuda:
            on_gpus[tensor.device][name] = tensor
        elif tensor.is_contiguous() and tensor.data_ptr() % 4 == 0:
            on_host.append((name, tensor))
        else:
            # Its words cannot be read in place.
            on_host.append((name, tensor.detach().clone(memory_format=torch.contiguous_format)))
    for tensors in on_gpus.values():
        # Imported here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels import DeviceDigest

        total += DeviceDigest.value(DeviceDigest(tensors).launch())
    # `on_host` keeps the tensors alive, because they are read by address.
    layout = layout_of(tuple(where(name, tensor) for name, tensor in on_host))
    found = [torch.empty(0, dtype=torch.int32)] * len(layout.pieces)

    def take(numbered: tuple[int, DigestPiece]) -> None:
        found[numbered[0]] = numbered[1].sums()

    # The threads share the words of all tensors together.
    wanted = threads or threads_here()
    share(take, list(enumerate(layout.pieces)), wanted if layout.words >= WORTH_THREADS else 1, "digest")
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
    Used by one thread, which must close it; helper threads do the work.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._layout: DigestLayout | None = None
        self._base = 0
        self._held: Mapping[str, torch.Tensor] = {}
        self._coming: deque[tuple[int, DigestPiece]] = deque()
        self._sums: dict[int, Future[torch.Tensor]] = {}
        self._pool = ThreadPoolExecutor(threads_here(), thread_name_prefix="digest")

    @property
    def begun(self) -> bool:
        """Whether `grown` was called at least once."""
        return self._layout is not None

    def grown(self, weights: Mapping[str, torch.Tensor], nbytes: int) -> None:
        """Report that the first `nbytes` packed bytes have arrived and do not change any more.

        `weights` are views of the whole buffer; every call must pass the same views.
        """
        if self._layout is None:
            self._held = weights
            self._base = min(weights[entry.name].data_ptr() - entry.offset for entry in self._entries if entry.nbytes)
            self._layout = layout_of(tuple(where(entry.name, weights[entry.name]) for entry in self._entries))
            self._coming = deque(sorted(enumerate(self._layout.pieces), key=lambda piece: piece[1].end))
        while self._coming and self._coming[0][1].end - self._base <= nbytes:
            number, piece = self._coming.popleft()
            self._sums[number] = self._pool.submit(piece.sums)

    def value(self) -> int:
        """Return the digest after all bytes have arrived."""
        assert self._layout is not None and not self._coming
        return self._layout.digest([self._sums[number].result() for number in range(len(self._layout.pieces))])

    def close(self) -> None:
        """End the helper threads and release the weights. Idempotent."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._held = {}
