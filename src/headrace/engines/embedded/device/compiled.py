"""Compiles decoder layers: one compilation serves all layers of a kind and all batch sizes.

Attention is opaque to the compiler. The compiler fuses the rest: norms, rotary embeddings, activations and residuals.
"""

from __future__ import annotations

from typing import Any

import torch

from headrace.models.compiling import prepare_to_compile


def compile_layers(model: Any) -> bool:
    """Compile every decoder layer in place, lazily. Return False if the model has no list of layers."""
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return False
    prepare_to_compile(model)
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True)
    return True


def undo_compile(model: Any) -> None:
    """Restore the original forward of every layer."""
    for layer in model.get_decoder().layers:
        layer.__dict__.pop("forward", None)
