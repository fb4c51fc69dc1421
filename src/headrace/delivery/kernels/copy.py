"""This kernel copies hundreds of tensors in one launch, at the bandwidth of one large copy.

Torch fuses such copies too, but into launches with too few blocks to fill a GPU. Here each program copies one run of
words of one tensor, and one launch has the programs of all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import triton
import triton.language as tl

from headrace.delivery.copying import check_shape, copy_all

TILE = 8192
"""The number of words that a program copies."""
WARPS = 8

_FIELDS = 3
_ALIGNMENT = tl.constexpr(16)
"""The bytes that a thread copies at a time. The kernel is compiled for addresses that are multiples of it."""


class DeviceCopy:
    """A copy between tensors on one device, prepared once. Targets and sources must keep their addresses.

    Tensors that are not contiguous, not aligned, not a whole number of words, or cast are left to `copy_all`.
    """

    def __init__(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        """Prepare the copy; raises `DeliveryError` if a shape differs."""
        runs = [np.empty((0, _FIELDS), np.int64)]
        self._others: dict[str, torch.Tensor] = {}
        for name, target in targets.items():
            check_shape(name, target, sources[name])
            if _in_words(target, sources[name]):
                runs.append(tensor_runs(target.data_ptr(), sources[name].data_ptr(), target.nbytes // 4))
            else:
                self._others[name] = target
        self._sources = sources
        device = next((target.device for target in targets.values()), torch.device("cpu"))
        self.runs = torch.from_numpy(np.concatenate(runs)).to(device)
        """The table that the kernel reads. A recorded launch needs this table and nothing else of this object."""
        # A kernel is loaded at its first launch, and loading is not possible while a graph is recorded.
        _copy(torch.zeros_like(self.runs[:1]))

    @torch.no_grad()
    def launch(self) -> None:
        """Enqueue the copy on the current stream."""
        _copy(self.runs)
        copy_all(self._others, self._sources)


def _copy(runs: torch.Tensor) -> None:
    if len(runs):
        with torch.cuda.device_of(runs):
            _copy_runs[(len(runs),)](runs, TILE, _FIELDS, num_warps=WARPS)


def _in_words(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return whether the kernel can copy this pair."""
    return (
        target.dtype == source.dtype
        and target.nbytes % 4 == 0
        and all(each.is_contiguous() and each.data_ptr() % _ALIGNMENT.value == 0 for each in (target, source))
    )


def tensor_runs(target: int, source: int, words: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return one row for each program over one tensor: target address, source address, number of words."""
    first = np.arange(0, words, TILE, dtype=np.int64)
    return np.stack([target + 4 * first, source + 4 * first, np.minimum(words - first, TILE)], axis=1)


@triton.jit
def _copy_runs(runs, TILE: tl.constexpr, FIELDS: tl.constexpr):
    run = runs + tl.program_id(0).to(tl.int64) * FIELDS
    # The alignment hints, and a run without a mask, let a thread copy several words at a time.
    target = tl.multiple_of(tl.load(run).to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    source = tl.multiple_of(tl.load(run + 1).to(tl.pointer_type(tl.int32)), _ALIGNMENT)
    words = tl.load(run + 2)
    lanes = tl.arange(0, TILE)
    if words == TILE:
        tl.store(target + lanes, tl.load(source + lanes))
    else:
        tl.store(target + lanes, tl.load(source + lanes, mask=lanes < words), mask=lanes < words)
