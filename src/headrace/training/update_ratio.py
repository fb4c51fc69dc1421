"""How far a step moves the weights: |change| / |weights|, from evenly spaced slices of every parameter.

A copy of all weights would be needed to have it exactly; up to `SAMPLE` elements of a parameter it is exact. Which
elements are looked at follows from the whole parameter, so the ratio is the same however it is cut into shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.training.transfer import upload

SAMPLE = 1 << 14


class UpdateRatio:
    """Looks at weights before a step, and again after it."""

    @torch.no_grad()
    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        starts: Callable[[torch.Tensor], Sequence[int]] = lambda parameter: [0] * parameter.ndim,
        copies: Callable[[torch.Tensor], int] = lambda parameter: 1,
        summed: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    ) -> None:
        """`starts` tells where this rank's part of a parameter begins, `copies` how many ranks hold that same part.

        `summed` adds up numbers of all ranks.
        """
        self._summed = summed
        self._views, self._scales = [], []
        for parameter in parameters:
            strides = _strides(parameter.shape)
            slices = (
                slice(-start % stride, None, stride) for start, stride in zip(starts(parameter), strides, strict=True)
            )
            self._views.append(_local(parameter)[tuple(slices)])
            seen = math.prod(-(-size // stride) for size, stride in zip(parameter.shape, strides, strict=True))
            self._scales.append(parameter.numel() / max(1, seen) / copies(parameter))
        self._before = [view.clone() for view in self._views]

    @torch.no_grad()
    def after(self) -> torch.Tensor:
        """The ratio of what the step has changed, where the weights are."""
        if not self._views:
            return torch.zeros(())
        changes = [view - before for view, before in zip(self._views, self._before, strict=True)]
        moved, whole = self._summed(torch.stack([self._square(tensors) for tensors in (changes, self._before)]))
        return torch.sqrt(moved / whole.clamp(min=torch.finfo(whole.dtype).tiny))

    def _square(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        squares = torch.stack([norm.square() for norm in torch._foreach_norm(tensors)])
        return (squares * upload(np.array(self._scales), squares.device, squares.dtype)).sum()


def _strides(shape: Sequence[int]) -> list[int]:
    """Steps along each dimension that leave about `SAMPLE` elements, from the first dimension on."""
    strides, left = [], math.prod(shape) // SAMPLE
    for size in shape:
        strides.append(max(1, min(size, left)))
        left //= strides[-1]
    return strides


def _local(parameter: Any) -> torch.Tensor:
    """What of a parameter is here: all of it, or this rank's shard."""
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found.detach()
