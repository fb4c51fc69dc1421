"""The update ratio says how far a step moves the weights: |change| / |weights|, from a sample of every parameter.

An exact ratio would need a copy of all weights, so only evenly spaced elements of each parameter are compared. For
parameters of up to `SAMPLE` elements the ratio is exact. The choice of elements depends on the whole parameter, so the
ratio is the same however a parameter is cut into shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from headrace.training.devices import upload
from headrace.training.ranks.sharding import local_tensor

SAMPLE = 1 << 14


class UpdateRatio:
    """The comparison of weights before a step with the same weights after it."""

    @torch.no_grad()
    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        starts: Callable[[torch.Tensor], Sequence[int]] = lambda parameter: [0] * parameter.ndim,
        copies: Callable[[torch.Tensor], int] = lambda parameter: 1,
        summed: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    ) -> None:
        """Remember the weights before a step.

        `starts` returns where this rank's part of a parameter begins, and `copies` returns how many ranks hold the same
        part. `summed` adds up numbers over all ranks.
        """
        self._summed = summed
        self._views, self._scales = [], []
        for parameter in parameters:
            strides = _strides(parameter.shape)
            slices = (
                slice(-start % stride, None, stride) for start, stride in zip(starts(parameter), strides, strict=True)
            )
            self._views.append(local_tensor(parameter).detach()[tuple(slices)])
            seen = math.prod(-(-size // stride) for size, stride in zip(parameter.shape, strides, strict=True))
            self._scales.append(parameter.numel() / max(1, seen) / copies(parameter))
        self._before = [view.clone() for view in self._views]

    @torch.no_grad()
    def after(self) -> torch.Tensor:
        """Return the ratio for what the step changed, as a tensor on the device of the weights."""
        if not self._views:
            return torch.zeros(())
        changes = [view - before for view, before in zip(self._views, self._before, strict=True)]
        moved, whole = self._summed(torch.stack([self._square(tensors) for tensors in (changes, self._before)]))
        return torch.sqrt(moved / whole.clamp(min=torch.finfo(whole.dtype).tiny))

    def _square(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        squares = torch.stack([norm.square() for norm in torch._foreach_norm(tensors)])
        return (squares * upload(np.array(self._scales), squares.device, squares.dtype)).sum()


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the stride along each dimension that leaves about `SAMPLE` elements.

    The first dimensions are thinned first.
    """
    strides, left = [], math.prod(shape) // SAMPLE
    for size in shape:
        strides.append(max(1, min(size, left)))
        left //= strides[-1]
    return strides
