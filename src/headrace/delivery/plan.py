"""A packing plan says where every tensor is in the packed bytes: a pure function of names, dtypes and shapes.

Tensors are packed in the order of their names at aligned offsets. Trainer and engine therefore make the same plan
without agreeing on an order, and two plans with the same digest describe the same bytes.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.copying import copy_all
from headrace.errors import DeliveryError

ALIGNMENT = 64


class PackingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The packed layout of a set of tensors."""

    entries: tuple[Entry, ...]
    nbytes: int
    digest: int
    """The digest of names, dtypes, shapes and offsets."""


def make_plan(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> PackingPlan:
    """Make the plan of these (name, dtype, shape) in any order; raises `DeliveryError` if a name occurs twice."""
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: tensor[0]):
        if entries and entries[-1].name == name:
            raise DeliveryError(f"two tensors are named {name}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = math.prod(shape) * dtype_of(dtype).itemsize
        entries.append(Entry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes))
        end = offset + nbytes
    if not end:
        raise DeliveryError("there are no weights to deliver")
    return PackingPlan(entries=tuple(entries), nbytes=end, digest=plan_digest(entries))


def plan_of(entries: Iterable[Entry]) -> PackingPlan:
    """Return the plan that these entries are from."""
    return make_plan((entry.name, entry.dtype, entry.shape) for entry in entries)


def packed_bytes(entries: Iterable[Entry]) -> int:
    """Return the number of packed bytes of these entries."""
    return max(entry.offset + entry.nbytes for entry in entries)


def plan_weights(weights: Mapping[str, torch.Tensor], dtype: str) -> PackingPlan:
    """Make the plan of these weights as published: floating-point tensors in `dtype`, all others in their own."""
    return make_plan(
        (name, dtype if tensor.is_floating_point() else dtype_name(tensor.dtype), tensor.shape)
        for name, tensor in weights.items()
    )


def plan_digest(entries: Iterable[Entry]) -> int:
    """Return a 64-bit hash of a layout, the same for every version of Python and torch and on every machine."""
    layout = [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in entries]
    return int.from_bytes(hashlib.blake2b(msgspec.json.encode(layout), digest_size=8).digest(), "little")


def unpack(packed: torch.Tensor, entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
    """Return views of the packed bytes (flat, uint8), one tensor per entry."""
    return {
        entry.name: packed[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry.dtype)).view(entry.shape)
        for entry in entries
    }


class Views:
    """Views of one packed buffer, cached for the last plan: making them takes longer than copying a small model."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self._made: tuple[tuple[Entry, ...], dict[str, torch.Tensor]] | None = None

    def of(self, entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
        """Return one tensor per entry, as `unpack` does."""
        wanted = tuple(entries)
        if self._made is None or self._made[0] != wanted:
            self._made = wanted, unpack(self.packed, wanted)
        return dict(self._made[1])


def pack(packed: torch.Tensor, entries: Iterable[Entry], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights to their places in the packed bytes, cast to the entries' dtypes."""
    copy_all(unpack(packed, entries), weights)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name; raises `DeliveryError` if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeliveryError(f"{name!r} is not a dtype")
    return dtype
