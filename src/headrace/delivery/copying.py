"""Copies of many tensors at once: fused on a GPU, and cut into pieces that several threads share in host memory.

Every copy is exact, or cast exactly as torch casts. Tensors that cannot be cut into pieces are left to torch.
"""

import ctypes
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.autograd.graph import increment_version

from headrace.errors import DeliveryError

MOST_THREADS = 4
"""The most threads to use. A few threads reach the memory bandwidth of most hosts; more only take cores from others."""
SPAN = 4 << 20
"""The bytes that a thread copies at a time: so many that the cost of a call does not matter, and so few that all
threads finish at about the same time."""
WORTH_THREADS = 4 * SPAN

T = TypeVar("T")
_Tensors = Mapping[str, torch.Tensor]
_Piece = Callable[[], object]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def threads_here() -> int:
    """Return the number of threads that share a short piece of work in this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, cores)


def share(work: Callable[[T], object], pieces: Sequence[T], threads: int, name: str) -> None:
    """Run `work` on each piece in `threads` threads, one of them the caller's; an exception in any is raised here.

    Exactly one thread takes each piece, and all pieces are done on return.
    """
    # All threads share one iterator, so that a thread whose core is busy takes fewer pieces.
    shared = iter(pieces)

    def take() -> None:
        for piece in shared:
            work(piece)

    if threads <= 1 or len(pieces) <= 1:
        take()
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix=name) as pool:
        others = [pool.submit(take) for _ in range(threads - 1)]
        take()
    for other in others:
        other.result()


@torch.no_grad()
def copy_all(targets: _Tensors, sources: _Tensors, *, non_blocking: bool = False, threads: int | None = None) -> None:
    """Copy every source over the target of the same name, cast to the target's dtype, in few launches.

    On a GPU torch fuses all copies with the same pair of dtypes. In host memory `threads` threads share the copies,
    by default `threads_here()`; 1 leaves them to torch. Raises `DeliveryError` at once if a shape differs.
    """
    wanted = threads or threads_here()
    together: list[tuple[torch.Tensor, torch.Tensor]] = []
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
    nbytes = sum(target.nbytes for target, _ in together)
    pieces = [piece for target, source in together for piece in _pieces(target, source)]
    share(lambda piece: piece(), pieces, wanted if nbytes >= WORTH_THREADS else 1, "copy")
    # Torch did not see the copy. Code that caches values derived from a tensor checks the tensor's version counter.
    for target, _ in together:
        increment_version(target)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View floats as integers: fused copies on a GPU convert floats to a wider dtype, in which NaNs lose bits."""
    return tensor.detach().view(_INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def all_on(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether all tensors are on this device; a GPU device must have its index."""
    # Indices, because making hundreds of `torch.device`s takes longer than enqueuing a copy.
    index = -1 if device.type == "cpu" else device.index
    return set(map(torch.Tensor.get_device, tensors.values())) <= {index}


def check_shape(name: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise `DeliveryError` unless target and source have the same shape."""
    if target.shape != source.shape:
        raise DeliveryError(f"{name} has shape {tuple(source.shape)}, not {tuple(target.shape)}")


def divisible(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether threads may share the copy of this pair: plain, contiguous tensors in host memory."""
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
