"""Two copies of the weights: 16 bits that the passes read, and master weights that the optimizer moves.

The masters keep what the model had before, and their storage: whoever holds them sees every step. Gradients of the
passes are added up in the masters' dtype; the 16-bit copy is the masters rounded, at every moment between two steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class HalfWeights:
    """Makes a model compute in a narrower dtype, in place."""

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
        """Move the gradients of a pass to the masters."""
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
        """Inside, the model's trainable parameters are the masters: to be written down, not to compute with."""
        held = {name: copy.data for name, copy in self._copies.items()}
        for name, copy in self._copies.items():
            copy.data = self.masters[name].data
        try:
            yield
        finally:
            for name, copy in self._copies.items():
                copy.data = held[name]
