"""A layout divides the words of whole tensors in host memory into pieces of digest work, which threads can share.

A layout is made once for each set of addresses. Exactly one piece computes each sum, so together the pieces read every
word. A layout reads tensors by address and does not keep them alive: its caller must hold the tensors while it is used.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from headrace.delivery.digest_factors import BLOCK, HEAD, Sums, count_sums, name_key, sum_keys, table
from headrace.delivery.plan import dtype_name

SPAN = 128 * BLOCK
"""The number of words in a piece."""
_GATHERED = 32
"""The number of short runs that are multiplied together; this many fit into a second-level cache."""


class Where(NamedTuple):
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

    def joined(self, found: Sequence[torch.Tensor]) -> Sums:
        """Return all sums in the order of the tensors, from the results of the pieces in the order of the pieces."""
        sums = np.zeros(len(self.keys), np.int32)
        if found:
            sums[np.concatenate([piece.places for piece in self.pieces])] = torch.cat(list(found)).numpy()
        return sums


def where(name: str, tensor: torch.Tensor) -> Where:
    """Describe a tensor that is `readable`."""
    return Where(name, dtype_name(tensor.dtype), tensor.data_ptr(), tensor.nbytes)


def readable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's words can be read in place, without a copy."""
    return tensor.is_contiguous() and tensor.data_ptr() % 4 == 0


@functools.lru_cache(maxsize=8)
def layout_of(tensors: tuple[Where, ...]) -> DigestLayout:
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


def _whole_blocks(tensor: Where, start: int) -> Iterator[DigestPiece]:
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
