"""Two copies of the weights: a 16-bit copy that the passes read, and master weights that the optimizer updates.

The masters take over the values and the memory of the model's original weights, so whoever holds those tensors sees
every step. Gradients of the passes are added up in the masters' dtype. Between two steps, the 16-bit copy is always the
rounded masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HalfWeights:
    """The conversion of a model, in place, to compute in a narrower dtype."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        self.masters: dict[str, torch.nn.Parameter] = {}
        """The trainable parameters, by name."""
        self._copies: dict[str, torch.nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            whole = parameter.data
            parameter.data = whole.to(dtype)
            if parameter.requires_grad:
                self.masters[name] = torch.nn.Parameter(whole)
                self._copies[name] = parameter

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of a pass to the masters, and drop them from the copy."""
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
        """Round the masters into the copy."""
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
