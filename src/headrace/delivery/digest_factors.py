"""The factors of words and of sums in a digest: pure functions of positions, names and dtypes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Sums = npt.NDArray[np.int32]
"""The sums of one whole tensor: h, then r of every block. The sums of disjoint parts are added with wrap-around."""

BLOCK = 1 << 13
"""The number of words in a block. The table of factors fits into a first-level cache, and the sums take little memory
compared with the weights."""
HEAD = 1 << 11
"""The number of words at a tensor's beginning whose upper halves count twice; it covers most norms and biases."""
MASK = (1 << 64) - 1

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
