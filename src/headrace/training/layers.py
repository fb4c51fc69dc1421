"""How decoder layers run in training: compiled, and computed again in the backward pass if memory is short.

One compilation serves all layers of a kind and all lengths of rows. If a compilation fails, one line says so, and the
layers run uncompiled from then on.

With activation checkpointing, a layer keeps only its inputs, and the backward pass computes the layer again. The
attention context of a row is active only while the row is computed, so the second run restores the context of the first
run, or its tokens would attend to other tokens than before. The same holds for random numbers: dropout must drop the
same elements again.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from headrace.errors import ModelError
from headrace.models.attention import attending, current_context, prepare_to_compile
from headrace.types import Batch

logger = logging.getLogger(__name__)

_ATTRIBUTE = "headrace_compiled"
OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {"triton.mix_order_reduction": False}
"""This fusion is off: it pays only in long rows, so torch would compile a layer again for every range of lengths."""
LONGEST = 256
"""The largest number of tokens in a sequence of a warm-up batch."""
SHARES = (1.0, 0.75)
"""The size of each warm-up batch as a fraction of a full row. Two sizes show the compiler that lengths vary."""


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """Return the model's decoder layers, in order."""
    count = model.config.get_text_config().num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not stacks:
        raise ModelError(f"{type(model).__name__} has no list of {count} layers that could be sharded one by one")
    return list(stacks[0])


class CompiledLayers:
    """The switch that runs layers compiled or uncompiled."""

    def __init__(self, layers: Iterable[torch.nn.Module], *, backend: str | Callable[..., Any] = "inductor") -> None:
        self.on = True
        self.fused = backend == "inductor"
        """Whether the compiler makes kernels, and does not only trace."""
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


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Run the layers uncompiled inside this context, for a few short passes that are not worth a compilation."""
    layers = compiled_layers(model)
    if layers is None:
        yield
        return
    before, layers.on = layers.on, False
    try:
        yield
    finally:
        layers.on = before


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

        draws = any(isinstance(m, torch.nn.Dropout) and m.training and m.p for m in layer.modules())
        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)

    return run


def warm_up_batches(vocabulary: int, row_tokens: int) -> Iterator[Batch]:
    """Yield batches of one row, in which every token except the first of each sequence is trained.

    The layers are compiled on these meaningless batches before the first real step. The batches are as large as the
    rows of real steps: a compiler that sees short rows first fits its reductions to them, and long rows stay slow.
    """
    for share in SHARES:
        tokens = max(4, int(share * row_tokens))
        count = -(-tokens // LONGEST)
        lengths = np.full(count, tokens // count, np.int32)
        total = int(lengths.sum())
        trained = np.ones(total, np.bool_)
        trained[lengths.cumsum() - lengths] = False
        yield Batch(
            step=0,
            version=0,
            objective="imitation",
            token_ids=(np.arange(total) % vocabulary).astype(np.int32),
            lengths=lengths,
            groups=np.arange(count, dtype=np.int32),
            trained=trained,
            logprobs=np.zeros(total, np.float32),
            versions=np.zeros(total, np.int32),
            advantages=np.zeros(total, np.float32),
            weights=np.full(total, 1 / total, np.float32),
        )
