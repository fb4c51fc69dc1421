"""Activation checkpointing by decoder layer: the backward pass computes a layer again, in the context of its forward.

The attention context of a row is active only while the row is computed. A layer that is computed again must restore the
context of its first run, or its tokens would attend to other tokens than before. The same holds for random numbers:
dropout must drop the same elements again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headrace.models.attention import attending, current_context


def recompute_layers(layers: Iterable[torch.nn.Module]) -> None:
    """Make these layers keep only their inputs for the backward pass."""
    for layer in layers:
        layer.forward = _recomputed(layer, layer.forward)


def _recomputed(layer: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        context = current_context()

        def again(*inner: Any, **named: Any) -> Any:
            with attending(context):
                return forward(*inner, **named)

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=_draws(layer), **kwargs)

    return run


def _draws(layer: torch.nn.Module) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.training and module.p for module in layer.modules())
