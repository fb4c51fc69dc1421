"""How far a step moves the weights: |change| / |weights|, from evenly spaced elements of every parameter.

A copy of all weights would be needed to have it exactly; up to `SAMPLE` elements of a parameter it is exact.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

SAMPLE = 1 << 14


class UpdateRatio:
    """Looks at weights before a step, and again after it."""

    @torch.no_grad()
    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        copies: Callable[[torch.Tensor], int] = lambda parameter: 1,
        summed: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
    ) -> None:
        """`copies` tells how many ranks hold the same part of a parameter, `summed` adds up numbers of all ranks."""
        self._summed = summed
        self._views, self._scales = [], []
        for parameter in parameters:
            flat = _local(parameter).reshape(-1)
            self._views.append(flat[:: max(1, flat.numel() // SAMPLE)])
            self._scales.append(flat.numel() / max(1, self._views[-1].numel()) / copies(parameter))
        self._before = [view.clone() for view in self._views]

    @torch.no_grad()
    def after(self) -> float:
        """The ratio of what the step has changed."""
        if not self._views:
            return 0.0
        changes = [view - before for view, before in zip(self._views, self._before, strict=True)]
        moved, whole = self._summed([self._square(tensors) for tensors in (changes, self._before)])
        return math.sqrt(moved / max(whole, sys.float_info.min))

    def _square(self, tensors: list[torch.Tensor]) -> float:
        squares = torch.stack([norm.square() for norm in torch._foreach_norm(tensors)])
        return float((squares * squares.new_tensor(self._scales)).sum())


def _local(parameter: Any) -> torch.Tensor:
    """What of a parameter is here: all of it, or this rank's shard."""
    found: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found.detach()
