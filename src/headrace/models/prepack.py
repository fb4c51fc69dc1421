"""Faster matrix products on a CPU: weights are laid out for the processor once, not again in every call.

The parameters keep their names, shapes, addresses and digests. A packed copy is used only while its parameters are
unchanged, so a swap of weights is never answered with old weights.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

SMALLEST = 1 << 18
"""Products with fewer weights than this are not packed, because the fixed cost of a packed call outweighs the gain."""

_switch = threading.Lock()
_inside = 0
_before = True

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input. One product computes all of them."""


def pack_linears(model: nn.Module) -> int | None:
    """Compute a model's linear layers from packed copies wherever no gradient is needed.

    Return the number of packed products, which several layers may share. Return None if layers cannot be packed: they
    must be in float32 on a CPU, in a torch with oneDNN. Copies follow their parameters automatically, except after
    writes that torch does not count (through `.data`), which nothing may do to a served model. The packed layers take
    their memory a second time.
    """
    on_cpu = all(p.device.type == "cpu" and p.dtype == torch.float32 for p in model.parameters())
    if not on_cpu or not torch._C._has_mkldnn:
        return None
    groups = [members for members in _groups(model) if sum(m.weight.numel() for m in members) >= SMALLEST]
    for members in groups:
        _Product(members)  # the forward functions of the members hold it
    return len(groups)


@contextmanager
def small_products() -> Iterator[None]:
    """Compute small, unpacked products inside this context by BLAS without oneDNN, if torch has one thread.

    With more threads, BLAS threads would wait for each other whenever they share cores. Only for float32: oneDNN is the
    fast way for every other dtype.
    """
    global _inside, _before
    # The setting belongs to the whole process: the first thread to enter changes it, and the last to leave restores it.
    with _switch:
        if not _inside:
            _before = torch._C._get_mkldnn_enabled()
            torch._C._set_mkldnn_enabled(_before and torch.get_num_threads() > 1)
        _inside += 1
    try:
        yield
    finally:
        with _switch:
            _inside -= 1
            if not _inside:
                torch._C._set_mkldnn_enabled(_before)


def _groups(model: nn.Module) -> Iterator[list[nn.Linear]]:
    """Yield every plain linear layer once, grouped with the layers that read the same input."""
    taken: set[nn.Linear] = set()
    for parent in model.modules():
        for names in _SIBLINGS:
            members = [child for name in names if type(child := getattr(parent, name, None)) is nn.Linear]
            if len(members) == len(names) and _alike(members) and taken.isdisjoint(members):
                taken.update(members)
                yield members
    for module in model.modules():
        # A subclass may compute something else.
        if type(module) is nn.Linear and module not in taken:
            yield [module]


def _alike(linears: Sequence[nn.Linear]) -> bool:
    first = linears[0]
    return all(m.in_features == first.in_features and (m.bias is None) == (first.bias is None) for m in linears)


class _Product:
    """Linear layers over one input, stacked into one packed weight.

    The first layer that is called computes all of them. The others take their part if they are called with that same
    tensor.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._parameters = [p for member in linears for p in (member.weight, member.bias) if p is not None]
        self._sizes = [member.out_features for member in linears]
        self._width = linears[0].in_features
        self._versions: list[int] = []
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}
        self._call: Any = torch.ops.mkldnn._linear_pointwise.default
        self._pack()
        for index, member in enumerate(self._linears):
            member.forward = self._forward_of(index)  # type: ignore[method-assign]

    @torch.no_grad()
    def _pack(self) -> None:
        # The counters are read before the copy: after a concurrent write they are outdated, and the next call packs
        # again.
        self._versions = [p._version for p in self._parameters]
        self._input, self._parts = None, {}
        weights: list[torch.Tensor] = [member.weight for member in self._linears]
        biases: list[torch.Tensor] = [member.bias for member in self._linears if member.bias is not None]
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._weight = None
        self._weight = torch.ops.mkldnn._reorder_linear_weight(whole.detach().contiguous())
        self._bias = torch.cat(biases) if biases else None

    def _forward_of(self, index: int) -> Any:
        member = self._linears[index]

        def forward(input: torch.Tensor) -> torch.Tensor:
            # A single row is a product of matrix and vector, for which the plain layout is the faster one.
            if torch.is_grad_enabled() or input.numel() <= self._width:
                return linear(input, member.weight, member.bias)
            return self._part(input, index)

        return forward

    def _part(self, source: torch.Tensor, index: int) -> torch.Tensor:
        if source is self._input and index in self._parts:
            part = self._parts.pop(index)
            if not self._parts:
                self._input = None
            return part
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                self._pack()
                break
        product: torch.Tensor = self._call(source, self._weight, self._bias, "none", [], "")
        if len(self._sizes) == 1:
            return product
        self._input, self._parts = source, dict(enumerate(product.split_with_sizes(self._sizes, -1)))
        return self._parts.pop(index)
