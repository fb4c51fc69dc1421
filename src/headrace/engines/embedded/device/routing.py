"""Lets the routers of compiled layers choose their experts by a kernel in place of torch's `topk`.

Torch's `topk` takes two launches for the short rows of a router, each longer than the kernel. Only `topk` over the last
dimension of short rows is replaced, in the graph that is compiled: the code of the model stays as it is.
"""

from typing import Any

import torch

from headrace.engines.embedded.kernels.topk import LONGEST_ROW, MOST_CHOSEN, short_topk


@torch.library.custom_op("headrace::short_topk", mutates_args=())
def _opaque(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found, places = short_topk(values.reshape(-1, values.shape[-1]), count)
    shape = (*values.shape[:-1], count)
    return found.view(shape), places.view(shape)


@_opaque.register_fake
def _(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*values.shape[:-1], count)
    return values.new_empty(shape), values.new_empty(shape, dtype=torch.int64)


def replace_topk(graph: torch.fx.GraphModule) -> int:
    """Replace every `topk` that fits in this graph. Return their number."""
    replaced = 0
    for node in list(graph.graph.nodes):
        if _is_topk(node) and (given := _arguments(*node.args, **node.kwargs)) is not None:
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.call_function(torch.ops.headrace.short_topk.default, given))
            graph.graph.erase_node(node)
            replaced += 1
    graph.recompile()
    return replaced


def _is_topk(node: torch.fx.Node) -> bool:
    called = node.op == "call_function" and node.target is torch.topk
    return called or (node.op == "call_method" and node.target == "topk")


def _arguments(
    values: Any, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = True, **others: Any
) -> tuple[torch.fx.Node, int] | None:
    """Return the arguments of the kernel for a call of `topk`, or None if the kernel does not fit."""
    example = values.meta.get("example_value")
    if others or not isinstance(example, torch.Tensor) or example.dim() == 0 or not example.is_floating_point():
        return None
    size, last = example.shape[-1], dim in (-1, example.dim() - 1)
    fits = isinstance(size, int) and isinstance(k, int) and size <= LONGEST_ROW and 0 < k <= min(size, MOST_CHOSEN)
    return (values, k) if fits and last and largest is True and example.dtype != torch.float64 else None
