"""Two copies of the weights: a 16-bit copy that the passes read, and master weights that the optimizer updates.

Call `collect` after each pass, and `refresh` after each optimizer step. Then the gradients of all passes are added up
in the dtype of the masters, and between two steps the 16-bit copy always equals the rounded masters. The masters keep
the memory of the model's original weights, so code that holds those tensors sees every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HalfWeights:
    """The two copies of one model's weights. Making this object changes the model's parameters to `dtype` in place."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.masters: dict[str, torch.nn.Parameter] = {}
        """The master weights of the trainable parameters, by name. The optimizer updates these."""
        self._copies: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            whole = parameter.data
            parameter.data = whole.to(dtype)
            if parameter.requires_grad:
                self.masters[name] = torch.nn.Parameter(whole)
                self._copies[name] = parameter

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of the last pass to those of the masters, and drop them from the 16-bit copy."""
        for name, copy in self._copies.items():
            if copy.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = copy.grad.to(master.dtype)
            else:
                master.grad.add_(copy.grad)
            copy.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters into the 16-bit copy."""
        if self._copies:
            copies: list[torch.Tensor] = list(self._copies.values())
            torch._foreach_copy_(copies, [self.masters[name].data for name in self._copies])

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Make the model's trainable parameters the masters inside this context: for saving, not for computing."""
        held = {name: copy.data for name, copy in self._copies.items()}
        for name, copy in self._copies.items():
            copy.data = self.masters[name].data
        try:
            yield
        finally:
            for name, copy in self._copies.items():
                copy.data = held[name]
