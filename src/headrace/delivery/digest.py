"""One number for a set of weights, the same however they are cut, ordered, packed or placed.

The digest is the sum modulo 2^64 of one hash per element, keyed by (canonical name, dtype, flat index), so the digests
of disjoint shards add up to the digest of the whole, and CPU and GPU agree to the bit.

The hash of an element is `key * (bits + OFFSET)` with an odd key, `key = T[i % BLOCK] * A(name, dtype, i // BLOCK)`.
`bits` is the value's bit pattern as a signed integer of at most 32 bits; wider values count as two elements. So:

- one changed element always shows: an odd number times a difference below 2^32 is not 0 modulo 2^64;
- two exchanged elements of one block always show: the low bits of the table T are a permutation, so two of its entries
  differ by at most 2^15 times an odd number;
- any other change that was not made with the keys in mind goes unseen with a probability of about 2^-32 at worst (it
  touches sign bits only) and 2^-63 at best.

It guards against mistakes, not against an attacker. It costs one multiplication per element: the tables are fixed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import cast

import torch

from headrace.delivery.plan import dtype_name

BLOCK = 1 << 15
"""Elements under one table: its 64-bit words fit a second-level cache, and torch splits no such operation into threads,
so a digest beside a training step takes one core and never waits for the others."""
OFFSET = 0x1B873593CC9E2D51
"""Added to every value, so that zeros count too."""

GOLDEN = 0x9E3779B97F4A7C15
"""From one block's key to the next, before they are mixed."""
MULTIPLIER = 0xD6E8FEB86659FD93
"""What mixes them."""
MASK = (1 << 64) - 1

_ROWS_ON_DEVICE = 256
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def digest(weights: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The digest of whole tensors, in any order: an unsigned 64-bit number."""
    total = 0
    on_gpus: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in weights:
        if tensor.is_cuda:
            on_gpus.setdefault(tensor.device, []).append((name, tensor))
        else:
            total += digest_shard(name, tensor)
    for pairs in on_gpus.values():
        # Late: only where there is a GPU is there a need for Triton.
        from headrace.delivery.digest_kernel import DeviceDigest

        total += DeviceDigest.value(DeviceDigest(pairs).launch())
    return total & MASK


def digest_shard(name: str, tensor: torch.Tensor, start: int = 0) -> int:
    """The part of `name`'s digest that comes from its elements `start ..`, which `tensor` holds in row-major order."""
    values = tensor.detach().reshape(-1)
    key = name_key(name, dtype_name(tensor.dtype))
    words = values.view(_WORDS[word_bytes(tensor.dtype)])
    start *= values.element_size() // word_bytes(tensor.dtype)
    total = 0
    while len(words):
        # Whole blocks go together; the ends of a shard that starts or stops inside a block go alone.
        place = start % BLOCK
        count = min(len(words), BLOCK - place) if place or len(words) < BLOCK else len(words) // BLOCK * BLOCK
        total += _span(words[:count], key, start // BLOCK, place)
        words, start = words[count:], start + count
    return total & MASK


def _span(words: torch.Tensor, key: int, block: int, place: int) -> int:
    """The sum over words that start at `place` of `block` and either stay in it or are whole blocks."""
    width = min(len(words), BLOCK)
    factors, offset = table(words.device)[place : place + width], OFFSET * _table_sum(place, width) & MASK
    dots = _dots(words.view(-1, width), factors)
    return sum((dot + offset) * _block_key(key, block + row) for row, dot in enumerate(dots))


def _dots(rows: torch.Tensor, factors: torch.Tensor) -> list[int]:
    """The product of every row with its factors, modulo 2^64."""
    if len(rows) == 1:
        return [int(rows.to(torch.int64).mul_(factors).sum())]
    chunks = torch.split(rows, 1 if rows.device.type == "cpu" else _ROWS_ON_DEVICE)
    wide = torch.empty_like(chunks[0], dtype=torch.int64)
    sums = [wide.copy_(chunk).mul_(factors).sum(dim=1) for chunk in chunks[:-1]]
    sums.append(wide[: len(chunks[-1])].copy_(chunks[-1]).mul_(factors).sum(dim=1))
    return cast(list[int], torch.cat(sums).tolist())


def _mix(value: int) -> int:
    """A bijection of 64-bit numbers under which neighbours become strangers."""
    value = (value ^ value >> 32) * MULTIPLIER & MASK
    value = (value ^ value >> 32) * MULTIPLIER & MASK
    return value ^ value >> 32


def word_bytes(dtype: torch.dtype) -> int:
    """Bytes of what counts as one element: wider values count as several."""
    return min(dtype.itemsize, 4)


def name_key(name: str, dtype: str) -> int:
    """The key of a tensor's first block, before it is mixed."""
    return int.from_bytes(hashlib.blake2b(f"{dtype} {name}".encode(), digest_size=8).digest(), "little")


def _block_key(key: int, block: int) -> int:
    return _mix(key + block * GOLDEN & MASK) | 1


@functools.cache
def _table_values() -> list[int]:
    """T: random high bits over the odd numbers below 2 * BLOCK in random order."""
    noise = [_mix((index + 1) * GOLDEN & MASK) for index in range(BLOCK)]
    order = sorted(range(BLOCK), key=noise.__getitem__)
    return [_mix(value) // (2 * BLOCK) * (2 * BLOCK) + 2 * rank + 1 for value, rank in zip(noise, order, strict=True)]


@functools.cache
def _prefix_sums() -> list[int]:
    sums = [0]
    for value in _table_values():
        sums.append(sums[-1] + value)
    return sums


def _table_sum(place: int, width: int) -> int:
    return _prefix_sums()[place + width] - _prefix_sums()[place]


@functools.cache
def table(device: torch.device) -> torch.Tensor:
    """T on this device, its 64-bit words as signed ones."""
    signed = [value - (1 << 64) if value >> 63 else value for value in _table_values()]
    return torch.tensor(signed, dtype=torch.int64, device=device)
