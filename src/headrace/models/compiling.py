"""What lets one compilation serve all layers of a kind and all lengths of a pass.

To a compiler a number on a module is a constant, and a layer with another one is compiled anew. Sizes of heads shall be
constants: what is computed from them is then simple arithmetic. The number of a layer shall not, so where a compiled
layer needs it, it lies in a tensor, of which the compiler knows the shape alone.
"""

from __future__ import annotations

from typing import Any

import torch

LAYER = "layer_idx"
"""How transformers' attention modules call their layer's number."""
COLUMN = "headrace_column"
"""The attribute of an experts module that says which column of a record of routing is its own."""
COMPILATIONS = 64
"""Of one layer's code; at the limit torch would raise."""
_SUFFIX = "_as_tensor"


def prepare_to_compile(model: Any) -> None:
    """Put the numbers of this model's layers where `number_of` finds them; call it before compiling."""
    # Loaded here: it takes a second, and most processes compile nothing.
    import torch._dynamo

    # Kinds of layers, passes with and without gradients, and models in one process add up on one function.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, COMPILATIONS)
    # Epsilons and scales are the same in all layers; as variables each would be a tensor that the host makes per call.
    torch._dynamo.config.specialize_float = True
    for module in model.modules():
        for name in (LAYER, COLUMN):
            if isinstance(number := getattr(module, name, None), int):
                setattr(module, name + _SUFFIX, torch.tensor(number))


def number_of(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """The number of this name, for compiled code: a tensor in host memory, or None where there is none.

    Whether a module has the number itself must not be asked there: some versions of torch guard its value then.
    """
    return getattr(module, name + _SUFFIX, None)
