"""Preparations so that one compilation serves all layers of a kind and all lengths of a pass.

To a compiler, a number on a module is a constant, so a layer with another number is compiled again. Head sizes should
be constants, because the arithmetic on them is then simple. The number of a layer should not be a constant. So where a
compiled layer needs its number, the number is in a tensor, of which the compiler knows only the shape.
"""

from __future__ import annotations

from typing import Any

import torch

LAYER = "layer_idx"
"""The attribute in which transformers' attention modules keep the number of their layer."""
COLUMN = "headrace_column"
"""The attribute of an experts module that says which column of a routing record belongs to the module."""
COMPILATIONS = 64
"""How often the code of one layer may be compiled. At this limit torch raises an error."""
_SUFFIX = "_as_tensor"


def prepare_to_compile(model: Any) -> None:
    """Put the numbers of this model's layers where `number_of` finds them. Call this before compiling."""
    # The import is here because it takes a second, and most processes compile nothing.
    import torch._dynamo

    # Kinds of layers, passes with and without gradients, and several models in one process all count for one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
    # Epsilons and scales are equal in all layers. As variables, each would be a tensor that the host makes in every
    # call.
    torch._dynamo.config.specialize_float = True
    for module in model.modules():
        for name in (LAYER, COLUMN):
            if isinstance(number := getattr(module, name, None), int):
                setattr(module, name + _SUFFIX, torch.tensor(number))


def number_of(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """Return the number of this name for compiled code: a tensor in host memory, or None if there is none.

    Compiled code must not ask whether the module has the plain number: some versions of torch would then guard its
    value.
    """
    return getattr(module, name + _SUFFIX, None)
