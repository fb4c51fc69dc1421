"""How the words of whole tensors in host memory are shared out for a digest: by address, once for where they lie.

Every word is in exactly one piece, and every sum of exactly one too. A layout keeps nothing alive: it is for as long as
whoever asked for it holds the tensors.
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
"""Words of a piece."""
_GATHERED = 32
"""Short runs that are multiplied at a time: so many stay in a second-level cache."""


class Where(NamedTuple):
    """A tensor without gaps, on an address that words can be read from."""

    name: str
    dtype: str
    address: int
    nbytes: int


class DigestPiece(NamedTuple):
    """A part of the work."""

    end: int
    """The address after the last byte that is read."""
    sums: Callable[[], torch.Tensor]
    places: npt.NDArray[np.int64]
    """Where these sums stand among all."""


class DigestLayout(NamedTuple):
    """All of the work, in the order of the tensors."""

    pieces: tuple[DigestPiece, ...]
    keys: npt.NDArray[np.uint64]
    """What each sum counts."""
    words: int

    def joined(self, found: Sequence[torch.Tensor]) -> Sums:
        """What the pieces, in their order, have found, each in its place."""
        sums = np.zeros(len(self.keys), np.int32)
        if found:
            sums[np.concatenate([piece.places for piece in self.pieces])] = torch.cat(list(found)).numpy()
        return sums


def where(name: str, tensor: torch.Tensor) -> Where:
    """Of a tensor that is `readable`."""
    return Where(name, dtype_name(tensor.dtype), tensor.data_ptr(), tensor.nbytes)


def readable(tensor: torch.Tensor) -> bool:
    """Whether its words can be read where they lie."""
    return tensor.is_contiguous() and tensor.data_ptr() % 4 == 0


@functools.lru_cache(maxsize=8)
def layout_of(tensors: tuple[Where, ...]) -> DigestLayout:
    """Kept for a few sets: the live weights, and the places that versions lie in, are the same again and again."""
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
    """Fewer bytes than a block has, and the place of the sum that they make."""

    address: int
    nbytes: int
    place: int


def _whole_blocks(tensor: Where, start: int) -> Iterator[DigestPiece]:
    factors, rows = torch.from_numpy(table()[:BLOCK]), tensor.nbytes // (4 * BLOCK)
    for first in range(0, rows, SPAN // BLOCK):
        count = min(SPAN // BLOCK, rows - first)
        address = tensor.address + 4 * BLOCK * first
        # Vectorised, which numpy's product of integers is not.
        product = functools.partial(torch.mv, _words_at(address, count * BLOCK).view(count, BLOCK), factors)
        yield DigestPiece(address + 4 * BLOCK * count, product, np.arange(start + 1 + first, start + 1 + first + count))


def _words_at(address: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(memoryview((ctypes.c_int32 * count).from_address(address)), np.int32))


def _gathered(runs: Sequence[_Run], factors: torch.Tensor, shift: int) -> Iterator[DigestPiece]:
    """Short runs, many at a time: a call costs more than what it computes for one of them."""
    some = [run for run in runs if run.nbytes]
    for first in range(0, len(some), _GATHERED):
        group = some[first : first + _GATHERED]
        words = [_words_at(run.address, run.nbytes // 4) for run in group]
        # Bytes that make no word: the last one is padded, in a copy.
        rests = [(number, run) for number, run in enumerate(group) if run.nbytes % 4]
        yield DigestPiece(
            max(run.address + run.nbytes for run in group),
            functools.partial(_multiplied, words, rests, factors, shift),
            np.array([run.place for run in group]),
        )


def _multiplied(
    words: Sequence[torch.Tensor], rests: Sequence[tuple[int, _Run]], factors: torch.Tensor, shift: int
) -> torch.Tensor:
    """The sums of these runs, each of which begins with the first factor."""
    padded = list(words)
    for number, run in rests:
        padded[number] = torch.zeros(-(-run.nbytes // 4), dtype=torch.int32)
        ctypes.memmove(padded[number].data_ptr(), run.address, run.nbytes)
    # In one call: of the threads that share the work only one at a time is in Python.
    rows = pad_sequence(padded, batch_first=True)
    if shift:
        rows >>= shift
    return torch.mv(rows, factors[: rows.shape[1]])
