"""The weights of a delivery benchmark: two sets that are published in turn, and the canary's log-probabilities of each.

The two sets differ in the last bit of a given share of words, because small optimizer steps cause such deltas. The two
sets of an adapter differ everywhere, as the tensors of an adapter do after any step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.bench.delivery_options import RANK, DeliveryBench
from headrace.bench.engine_rescore import plain_twin, row_logprobs
from headrace.bench.engine_swaps import canary_tokens, install
from headrace.bench.publishing import Weights
from headrace.delivery.base import Kind
from headrace.delivery.digest import digest
from headrace.engines.base import Sampling
from headrace.errors import UserError
from headrace.models.loading import load_model, named_weights
from headrace.models.lora import ALL_LINEAR, Adapter, LoraSpec
from headrace.models.shapes import SHAPES, build_shape
from headrace.types import Float32Array, Int32Array

_SPREAD = 0.02
"""The standard deviation of an adapter's random entries."""


@dataclass(frozen=True)
class Sets:
    """The two sets of weights that are published in turn."""

    weights: tuple[Weights, Weights]
    """The sets, in host memory."""
    logprobs: list[Float32Array]
    """The log-probabilities of the canary under each set."""
    canary: Int32Array
    base_digest: int
    """The digest of the weights under an adapter; 0 without an adapter."""


def check_model_name(model: str) -> None:
    """Raise a one-line `UserError` if this is neither the name of a shape nor a directory."""
    if model not in SHAPES and not Path(model).is_dir():
        raise UserError(f"--model-shape {model}: neither a model directory nor a shape (one of {', '.join(SHAPES)})")


def load(model: str, dtype: str, device: str, seed: int) -> Any:
    """Return the model that trainer and engines begin with. It is the same in every process."""
    if model in SHAPES:
        return build_shape(model, dtype, device, seed)
    return load_model(model, dtype=dtype, seed=seed, device=device)


def served_adapter(model: Any) -> tuple[Adapter, int]:
    """Attach an adapter to this model, as an engine serves it (merged).

    Return the adapter and the digest of the weights under it.
    """
    base = digest(named_weights(model).items())
    return Adapter(model, LoraSpec(rank=RANK, alpha=2.0 * RANK, targets=(ALL_LINEAR,)), "merged"), base


@torch.inference_mode()
def make_sets(options: DeliveryBench, model: Any, dtype: str, kind: Kind) -> Sets:
    """Return two sets of what a trainer of this model would send. The model has the second set afterwards."""
    draw = torch.Generator().manual_seed(options.seed)
    canary = canary_tokens(int(model.get_input_embeddings().weight.shape[0]))
    if kind == "adapter":
        adapter, base = served_adapter(model)
        live, apply = adapter.weights(), adapter.apply
        pair = (_random(live, dtype, draw), _random(live, dtype, draw))
    else:
        base, apply, live = 0, None, named_weights(model)
        first = {name: tensor.to("cpu", copy=True) for name, tensor in live.items()}
        pair = (first, {name: flip_words(tensor, options.changed, draw) for name, tensor in first.items()})
    twin = plain_twin(model)
    logprobs = []
    for weights in pair:
        if apply is None:
            install(model, weights)
        else:
            for name, tensor in live.items():
                tensor.copy_(weights[name])
            apply()
        logprobs.append(row_logprobs(twin, canary[:1], canary[1:], Sampling(max_tokens=1)))
    return Sets(pair, logprobs, canary, base)


def flip_words(tensor: torch.Tensor, share: float, draw: torch.Generator) -> torch.Tensor:
    """Return a copy in which the last bit is flipped in this share of words, chosen at random."""
    changed = tensor.clone()
    count = round(share * tensor.numel())
    if not count or not tensor.is_floating_point():
        return changed
    words = changed.view(-1).view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    chosen = torch.randperm(len(words), generator=draw)[:count]
    words[chosen] ^= 1
    return changed


def _random(like: Weights, dtype: str, draw: torch.Generator) -> Weights:
    return {
        name: (_SPREAD * torch.randn(tensor.shape, generator=draw)).to(getattr(torch, dtype))
        for name, tensor in like.items()
    }
