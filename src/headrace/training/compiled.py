"""Decoder layers compiled for training: one compilation serves all layers of a kind and all lengths of rows.

Attention is one operation that the compiler does not look into; the rest is fused. If a compilation fails, one line
says so, and the layers run uncompiled from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.models.compiling import prepare_to_compile
from headrace.training.head import PLAIN, Arithmetic, compiled_arithmetic

logger = logging.getLogger(__name__)

_ATTRIBUTE = "headrace_compiled"
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}
"""This fusion is off: it pays only in long rows, so torch would compile a layer again for every range of lengths."""


class CompiledLayers:
    """The switch that runs layers compiled or uncompiled."""

    def __init__(self, layers: Iterable[torch.nn.Module], *, backend: str | Callable[..., Any] = "inductor") -> None:
        self.on = True
        self.arithmetic = compiled_arithmetic() if backend == "inductor" else PLAIN
        # The import is here for the same reason as in `prepare_to_compile`.
        import torch._dynamo

        self.failure: type[Exception] = torch._dynamo.exc.TorchDynamoException
        """The exception that a failed compilation raises."""
        for layer in layers:
            layer.forward = self._switched(layer.forward, backend)

    def _switched(self, forward: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
        options = OPTIONS if backend == "inductor" else None
        compiled = torch.compile(forward, dynamic=True, fullgraph=True, backend=backend, options=options)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self.on else forward)(*args, **kwargs)

        return run

    def give_up(self, error: BaseException) -> None:
        """Log why compilation failed, and run the layers uncompiled from now on."""
        logger.warning("layers are trained uncompiled: %s", (str(error).strip().splitlines() or ["no reason given"])[0])
        self.on = False


def compile_model(
    model: Any, layers: Iterable[torch.nn.Module], *, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Set up these layers of a model, in place, to be compiled at their first use."""
    prepare_to_compile(model)
    model.__dict__[_ATTRIBUTE] = CompiledLayers(layers, backend=backend)


def compiled_layers(model: Any) -> CompiledLayers | None:
    """Return what `compile_model` attached to this model, or None."""
    found: CompiledLayers | None = getattr(model, "__dict__", {}).get(_ATTRIBUTE)
    return found


def arithmetic_of(model: Any) -> Arithmetic:
    """Return the functions that read logits: compiled if the layers are compiled."""
    layers = compiled_layers(model)
    return layers.arithmetic if layers is not None and layers.on else PLAIN


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the layers uncompiled inside this context, for a few short passes that are not worth a compilation."""
    layers = compiled_layers(model)
    before = layers is not None and layers.on
    if layers is not None:
        layers.on = False
    try:
        yield
    finally:
        if layers is not None:
            layers.on = before
