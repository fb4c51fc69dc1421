"""This module makes a model compute as if its weights were held in fewer bits, without a second copy of the weights.

The trainer uses it to compute what an engine with such weights computes. Inside `rounded`, every module computes with
its own parameters rounded to a dtype and back, one module at a time. When the pass of the module ends, its parameters
are restored, also after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headrace.models.four_bits import FourBitLinear


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Make passes inside this context see weights of this dtype. Not for gradients."""
    with ExitStack() as stack:
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.is_floating_point() and p.dtype != dtype]
            if isinstance(module, FourBitLinear):
                module.rounding = dtype
                stack.callback(setattr, module, "rounding", None)
            if own:
                rounding = _Rounding(own, dtype)
                stack.callback(module.register_forward_pre_hook(rounding.begin).remove)
                stack.callback(module.register_forward_hook(rounding.end, always_call=True).remove)
        yield


class _Rounding:
    """The parameters of one module, and the values that they have outside its pass."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._own: list[torch.Tensor] = []

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self._own = [parameter.data for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.data = parameter.data.to(self._dtype).to(parameter.dtype)

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for parameter, own in zip(self._parameters, self._own, strict=True):
            parameter.data = own
        self._own = []
