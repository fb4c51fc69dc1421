"""Tensor parallelism by the module names that most model families share: q/k/v/o, gate/up/down, embedding and head.

Matrices into heads and inner features are cut by output, matrices back are cut by input, and the vocabulary is cut by
token. Everything else (norms, routers, experts) is the same on every tensor rank and sees the same activations. A
family whose attention or feed-forward holds an unknown part is refused: a slice that is mistaken for a whole would
train wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headrace.errors import ConfigError, ModelError

_HEADS_DIM = 2
"""The heads dimension of the norms of queries and keys: their input is [1, tokens, heads, head size]."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


def split_matrices(model: Any, layers: Sequence[torch.nn.Module], mesh: DeviceMesh) -> None:
    """Cut the model's matrices over this mesh, in place.

    Raises a one-line error if the model cannot be cut this way.
    """
    _check_sizes(model, mesh.size())
    for layer in layers:
        parallelize_module(layer, mesh, layer_plan(layer, type(model).__name__), src_data_rank=None)
    _split_vocabulary(model, mesh)


def layer_plan(layer: torch.nn.Module, family: str) -> dict[str, ParallelStyle]:
    """Return how each matrix of a decoder layer is cut, by its path in the layer."""
    found: dict[str, ParallelStyle] = {}
    attentions = [path for path, module in layer.named_modules() if hasattr(module, "o_proj")]
    if len(attentions) != 1:
        raise _no_plan(family, "a layer without q/k/v/o projections")
    [attention] = attentions
    _check_parts(layer.get_submodule(attention), (*_ATTENTION, *_HEAD_NORMS), family)
    for name, module in layer.get_submodule(attention).named_children():
        path = f"{attention}.{name}"
        if name in _HEAD_NORMS:
            found[path] = SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
        elif isinstance(module, torch.nn.Linear):
            found[path] = RowwiseParallel() if name == "o_proj" else ColwiseParallel()
    for path, module in layer.named_modules():
        if isinstance(getattr(module, "down_proj", None), torch.nn.Linear):
            _check_parts(module, _FEED_FORWARD, family)
            found |= {f"{path}.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
            found[f"{path}.down_proj"] = RowwiseParallel()
    return found


def _check_parts(module: torch.nn.Module, known: Sequence[str], family: str) -> None:
    for name, _ in module.named_parameters():
        if name.split(".")[0] not in known:
            raise _no_plan(family, f"{name} in {type(module).__name__}")
    needed = [name for name in known if name not in _HEAD_NORMS]
    if missing := [name for name in needed if not isinstance(getattr(module, name, None), torch.nn.Linear)]:
        raise _no_plan(family, f"no {missing[0]} in {type(module).__name__}")
    for name in _HEAD_NORMS:
        norm = getattr(module, name, None)
        if norm is not None and tuple(norm.weight.shape) != (getattr(module, "head_dim", None),):
            raise _no_plan(family, f"{name} over all heads in {type(module).__name__}")


def _check_sizes(model: Any, ranks: int) -> None:
    config = model.config.get_text_config()
    for noun in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, noun, None)
        if size is not None and size % ranks:
            raise ConfigError(f"[training] tensor_parallel: {ranks} does not divide the model's {noun} = {size}")


def _split_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if tied:
        # Both are cut by token, so they can share the part. They are tied again before the head's weight is cut a
        # second time.
        head.weight = embedding.weight
    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
    if tied:
        head.weight = embedding.weight


def _no_plan(family: str, why: str) -> ModelError:
    return ModelError(f"{family} cannot be trained with [training] tensor_parallel > 1: it has {why}")
