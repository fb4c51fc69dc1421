"""Copies between tensors in host memory are cut into pieces that several threads share.

Every copy is exact, or cast exactly as torch casts. Tensors that cannot be cut into pieces are left to torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.cores import share

SPAN = 4 << 20
"""The bytes that a thread copies at a time: so many that the cost of a call does not matter, and so few that all
threads finish at about the same time."""
WORTH_THREADS = 4 * SPAN

Pair = tuple[torch.Tensor, torch.Tensor]
"""A target and a source of the same shape."""
_Piece = Callable[[], object]


def divisible(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether this pair may be passed to `copy_together`: plain, contiguous tensors in host memory."""
    return (
        target.is_cpu
        and source.is_cpu
        and target.is_contiguous()
        and source.is_contiguous()
        and all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in (target, source))
        # A cast goes through torch. Torch would use all cores for each piece unless it has one thread, and it refuses
        # to write to an inference tensor in other threads, which are not in inference mode.
        and (target.dtype == source.dtype or (torch.get_num_threads() == 1 and not target.is_inference()))
    )


def copy_together(pairs: Sequence[Pair], threads: int) -> None:
    """Copy every source over its target, cast to the target's dtype. Every pair must be `divisible`."""
    nbytes = sum(target.nbytes for target, _ in pairs)
    pieces = [piece for target, source in pairs for piece in _pieces(target, source)]
    share(_do, pieces, threads if nbytes >= WORTH_THREADS else 1, "copy")
    # Torch did not see the copy. Code that caches values derived from a tensor checks the tensor's version counter.
    for target, _ in pairs:
        increment_version(target)


def _do(pieces: Iterator[_Piece]) -> None:
    for piece in pieces:
        piece()


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[_Piece]:
    if target.dtype == source.dtype:
        # Copied by address, because making views of hundreds of tensors takes longer.
        to, out_of, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        for start in range(0, nbytes, SPAN):
            yield functools.partial(ctypes.memmove, to + start, out_of + start, min(SPAN, nbytes - start))
        return
    # Detached, because gradient mode is set per thread and the other threads have it on.
    into, values = target.detach().view(-1), source.detach().view(-1)
    count = SPAN // target.element_size()
    for start in range(0, into.numel(), count):
        yield functools.partial(into[start : start + count].copy_, values[start : start + count])
