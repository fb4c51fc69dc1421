"""Copies between tensors in host memory, cut into pieces that the cores share.

Whatever is copied is copied exactly, or cast as torch casts it; what cannot be cut is left to torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.cores import share

SPAN = 4 << 20
"""Bytes that a thread copies at a time: a call costs nothing beside them, and the cores end together."""
WORTH_THREADS = 4 * SPAN

Pair = tuple[torch.Tensor, torch.Tensor]
"""What is written to, and what is read, of one shape."""
_Piece = Callable[[], object]


def divisible(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether these may go to `copy_together`: plain tensors in host memory, without gaps."""
    return (
        target.is_cpu
        and source.is_cpu
        and target.is_contiguous()
        and source.is_contiguous()
        and all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in (target, source))
        # Torch's own threads would each want all cores for a cast; and it writes to some only where they were made.
        and (target.dtype == source.dtype or (torch.get_num_threads() == 1 and not target.is_inference()))
    )


def copy_together(pairs: Sequence[Pair], threads: int) -> None:
    """Copy every source over its target, cast to its dtype. Only for what is `divisible`."""
    nbytes = sum(target.nbytes for target, _ in pairs)
    pieces = [piece for target, source in pairs for piece in _pieces(target, source)]
    share(_do, pieces, threads if nbytes >= WORTH_THREADS else 1, "copy")
    # Torch has not seen it: who keeps something that was made of a tensor looks at its version.
    for target, _ in pairs:
        increment_version(target)


def _do(pieces: Iterator[_Piece]) -> None:
    for piece in pieces:
        piece()


def _pieces(target: torch.Tensor, source: torch.Tensor) -> Iterator[_Piece]:
    if target.dtype == source.dtype:
        # By address: a model has hundreds of tensors, and a view of each takes longer than this.
        to, out_of, nbytes = target.data_ptr(), source.data_ptr(), target.nbytes
        for start in range(0, nbytes, SPAN):
            yield functools.partial(ctypes.memmove, to + start, out_of + start, min(SPAN, nbytes - start))
        return
    # Detached: whether torch keeps gradients is a matter of each thread's own.
    into, values = target.detach().view(-1), source.detach().view(-1)
    count = SPAN // target.element_size()
    for start in range(0, into.numel(), count):
        yield functools.partial(into[start : start + count].copy_, values[start : start + count])
