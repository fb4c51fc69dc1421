"""Fuses projections of one input into one matrix product: queries, keys and values; gate and up.

The weights of such projections are laid side by side in one memory, and each parameter becomes a view of its part. So
parameters keep their names and shapes, new weights are copied into them as before, and no copy has to be kept equal.
Each projection is then a slice of the whole product. `merge_equal_products` makes a compiler compute it once. Layers
in FP8 are laid out in this way from the beginning (`headrace.models.fp8`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Linear, Parameter
from torch.nn.functional import linear

from headrace.models.fp8 import SIBLINGS, fp8_product

PRODUCTS = (linear, fp8_product)
"""The functions whose equal calls are merged. Both depend on their arguments alone."""


class ProjectionPart(torch.nn.Module):
    """A projection that is a part of a larger one. It has the parameters of the projection that it replaces."""

    def __init__(self, part: Linear, whole: torch.Tensor, whole_bias: torch.Tensor | None, first: int) -> None:
        super().__init__()
        self.weight = part.weight
        self.bias = part.bias
        # In a tuple, so that the model does not count them: they are the memory of its parameters.
        self._whole = (whole, whole_bias)
        self._first, self._last = first, first + part.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this part of the product, [..., out_features]."""
        return linear(hidden, *self._whole)[..., self._first : self._last]


@torch.no_grad()
def fuse_projections(model: torch.nn.Module) -> int:
    """Fuse all groups of plain linear projections in this model. Return their number.

    The parameters move to other addresses. Projections with adapters stay as they are. Without a compiler that merges
    equal products, each part computes the whole product: right, but slower than before.
    """
    fused = 0
    for module in list(model.modules()):
        for names in SIBLINGS:
            parts: list[Any] = [getattr(module, name, None) for name in names]
            if _fit_together(parts):
                _fuse(module, names, parts)
                fused += 1
    return fused


def _fit_together(parts: list[Any]) -> bool:
    if not all(type(part) is Linear and "forward" not in vars(part) for part in parts):
        return False
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}
    return len(kinds) == 1


def _fuse(module: torch.nn.Module, names: tuple[str, ...], parts: list[Linear]) -> None:
    whole = _side_by_side([part.weight for part in parts])
    whole_bias = None if parts[0].bias is None else _side_by_side([part.bias for part in parts])
    first = 0
    for name, part in zip(names, parts, strict=True):
        setattr(module, name, ProjectionPart(part, whole, whole_bias, first))
        first += part.out_features


def _side_by_side(parameters: list[torch.Tensor]) -> Parameter:
    """Move these parameters into one tensor, one after the other, and return the tensor.

    It is of the class of parameters, so that its sizes are constants to a compiler.
    """
    whole = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
        parameter.data = part
    return Parameter(whole, requires_grad=False)


def prepare_to_merge() -> None:
    """Let every product in FP8 be one node of the graphs that are compiled from now on, as other products are."""
    torch.compiler.allow_in_graph(fp8_product)  # type: ignore[no-untyped-call]


def merge_equal_products(graph: torch.fx.GraphModule) -> None:
    """Let a product of the same input and the same weights be computed once in this graph."""
    found: dict[Any, torch.fx.Node] = {}
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in PRODUCTS:
            first = found.setdefault((node.args, tuple(node.kwargs.items())), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.graph.erase_node(node)
    graph.recompile()


def compile_after(*changes: Callable[[torch.fx.GraphModule], object]) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that changes a graph, and then compiles it as torch's inductor does."""

    def compile_changed(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        # Imported here, because the compiler takes seconds to load.
        from torch._inductor.compile_fx import compile_fx

        for change in changes:
            change(graph)
        return compile_fx(graph, inputs)

    return compile_changed
