"""Where every tensor lies in the packed bytes: a pure function of names, dtypes and shapes, the same on both sides.

Tensors are packed in the order of their names at aligned offsets, so trainer and engine need not agree on an order, and
two plans with one digest describe the same bytes.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.cores import threads_here
from headrace.delivery.host_copy import Pair, copy_together, divisible
from headrace.errors import DeliveryError

ALIGNMENT = 64
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The packed layout of a set of tensors."""

    entries: tuple[Entry, ...]
    nbytes: int
    digest: int
    """Of names, dtypes, shapes and offsets."""


def make_plan(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> PackingPlan:
    """The plan of these (name, dtype, shape) in any order; a name that comes twice is an error."""
    return _make_plan(tuple((name, dtype, tuple(shape)) for name, dtype, shape in tensors))


@functools.lru_cache(maxsize=8)
def _make_plan(tensors: tuple[tuple[str, str, tuple[int, ...]], ...]) -> PackingPlan:
    """A model has hundreds of tensors, and every version of it the same plan."""
    entries: list[Entry] = []
    end = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: tensor[0]):
        if entries and entries[-1].name == name:
            raise DeliveryError(f"two tensors are named {name}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = math.prod(shape) * dtype_of(dtype).itemsize
        entries.append(Entry(name=name, dtype=dtype, shape=shape, offset=offset, nbytes=nbytes))
        end = offset + nbytes
    if not end:
        raise DeliveryError("there are no weights to deliver")
    return PackingPlan(entries=tuple(entries), nbytes=end, digest=plan_digest(entries))


def plan_weights(weights: Mapping[str, torch.Tensor], dtype: str) -> PackingPlan:
    """The plan of these weights as they are published: floating ones in `dtype`, all others as they are."""
    return make_plan(
        (name, dtype if tensor.is_floating_point() else dtype_name(tensor.dtype), tensor.shape)
        for name, tensor in weights.items()
    )


def plan_digest(entries: Iterable[Entry]) -> int:
    """A 64-bit hash of a layout that no Python, torch or machine changes."""
    layout = [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in entries]
    return int.from_bytes(hashlib.blake2b(msgspec.json.encode(layout), digest_size=8).digest(), "little")


def unpack(packed: torch.Tensor, entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
    """Views of the packed bytes (flat, uint8), one tensor per entry."""
    return {
        entry.name: packed[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry.dtype)).view(entry.shape)
        for entry in entries
    }


class Views:
    """Views of one packed buffer, made anew only for another plan: they cost more than a small model's copy."""

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed
        self._made: tuple[tuple[Entry, ...], dict[str, torch.Tensor]] | None = None

    def of(self, entries: Iterable[Entry]) -> dict[str, torch.Tensor]:
        """One tensor per entry, as `unpack` gives them."""
        wanted = tuple(entries)
        if self._made is None or self._made[0] != wanted:
            self._made = wanted, unpack(self.packed, wanted)
        return dict(self._made[1])


def pack(packed: torch.Tensor, entries: Iterable[Entry], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy the weights to their places in the packed bytes, cast to the entries' dtypes."""
    with torch.no_grad():
        copy_all(unpack(packed, entries), weights)


def copy_all(
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    *,
    non_blocking: bool = False,
    threads: int | None = None,
) -> None:
    """Copy every source over the target of its name, cast to its dtype, in few launches.

    On a GPU torch fuses those of one pair of dtypes. `threads` share what is in host memory; without it, one for every
    core that this process may use, up to `MOST_THREADS`; 1 leaves it to torch. Raises `DeliveryError` before the first
    copy if a shape differs.
    """
    wanted = threads or threads_here()
    together: list[Pair] = []
    pairs: defaultdict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    pairs = defaultdict(lambda: ([], []))
    for name, target in targets.items():
        source = sources[name]
        check_shape(name, target, source)
        if wanted > 1 and divisible(target, source):
            together.append((target, source))
            continue
        if target.is_cuda and target.dtype == source.dtype:
            target, source = _bits(target), _bits(source)
        into, out_of = pairs[target.dtype, source.dtype]
        into.append(target)
        out_of.append(source)
    for into, out_of in pairs.values():
        torch._foreach_copy_(into, out_of, non_blocking=non_blocking)
    copy_together(together, wanted)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: fused copies on a GPU take floats through a wider dtype, where NaNs lose bits."""
    return tensor.detach().view(_INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def all_on(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether all of these lie there; of a GPU the index must be known.

    Asked before every copy: a `torch.device` for each of hundreds of tensors takes longer than enqueuing it.
    """
    index = -1 if device.type == "cpu" else device.index
    return set(map(torch.Tensor.get_device, tensors.values())) <= {index}


def check_shape(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `DeliveryError` unless one can be copied over the other."""
    if target.shape != source.shape:
        raise DeliveryError(f"{name} has shape {tuple(source.shape)}, not {tuple(target.shape)}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name; a name that is none is an error."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DeliveryError(f"{name!r} is not a dtype")
    return dtype
