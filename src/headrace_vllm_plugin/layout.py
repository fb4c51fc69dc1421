"""Compares the live weights of a vLLM worker with the weights that were loaded, as far as vLLM's layout shows them.

A fused parameter is cut into its members, and padding rows are left out. A worker of a tensor-parallel server holds a
slice of most tensors. Which slice, the layer says itself, by the attributes from which vLLM's own loaders cut. Weights
that are packed or quantised are hidden: they are counted and never guessed, and only the canary checks them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headrace_vllm_plugin.wire import Live

_ROWS = ("QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear")
"""vLLM's layers that hold a slice of the rows, the more special ones first."""
_COLUMNS = "RowParallelLinear"
_VOCABULARY = "VocabParallelEmbedding"

Tensors = Mapping[str, torch.Tensor]


class Pair(NamedTuple):
    """A live tensor of a worker, and the part of the loaded tensor that it must equal."""

    name: str
    live: torch.Tensor
    loaded: torch.Tensor
    cut: bool
    """Whether this is a slice of the loaded tensor."""


def compare(
    pairs: Sequence[Pair], loaded: Tensors, digest: Callable[[Tensors], int], loaded_digest: int | None = None
) -> Live:
    """Compare the visible live weights with the loaded ones by digest.

    `loaded_digest` is the digest of all loaded weights, if it is known already.
    """
    found = Live(hidden=len(loaded))
    with torch.no_grad():
        found.visible, found.hidden = len(pairs), len(loaded) - len(pairs)
        found.cut = sum(pair.cut for pair in pairs)
        if not pairs:
            return found
        found.digest = digest({pair.name: pair.live for pair in pairs})
        if found.hidden or found.cut or loaded_digest is None:
            loaded_digest = digest({pair.name: pair.loaded for pair in pairs})
        if found.digest != loaded_digest:
            found.wrong = [
                pair.name for pair in pairs if digest({pair.name: pair.live}) != digest({pair.name: pair.loaded})
            ]
    return found


def visible(model: torch.nn.Module, loaded: Tensors) -> Iterator[Pair]:
    """Yield the pairs of all loaded tensors whose layout is known."""
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    layers = dict(model.named_modules())
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, tensor in loaded.items():
        pair = _direct(name, live, layers, tensor) or _member(name, live, layers, mapping, loaded)
        if pair is not None and pair.live.dtype == tensor.dtype and pair.live.shape == pair.loaded.shape:
            yield pair


def _direct(name: str, live: Tensors, layers: Mapping[str, Any], tensor: torch.Tensor) -> Pair | None:
    """Return the pair of the parameter of that name, without padding rows; None if the parameter does not fit."""
    parameter = live.get(name)
    if parameter is None or parameter.dim() != tensor.dim() or not tensor.dim():
        return None
    own = _slice(layers[name.rpartition(".")[0]], tensor)
    if own is None or len(parameter) < len(own):
        return None
    return Pair(name, parameter.detach()[: len(own)], own, own.shape != tensor.shape)


def _member(
    name: str, live: Tensors, layers: Mapping[str, Any], mapping: Mapping[str, list[str]], loaded: Tensors
) -> Pair | None:
    """Return the pair of a member of a fused parameter: its rows follow the rows of the members before it."""
    parts = name.split(".")
    for fused, members in mapping.items():
        for place, part in enumerate(parts):
            if part not in members or part == fused:
                continue

            def sibling(member: str, place: int = place) -> str:
                return ".".join([*parts[:place], member, *parts[place + 1 :]])

            parameter = live.get(sibling(fused))
            if parameter is None or any(sibling(member) not in loaded for member in members):
                continue
            layer = layers[sibling(fused).rpartition(".")[0]]
            own = [_slice(layer, loaded[sibling(member)], first=not i) for i, member in enumerate(members)]
            rows = [len(one) for one in own if one is not None]
            if len(rows) < len(own) or parameter.dim() == 0 or len(parameter) != sum(rows):
                continue
            at = members.index(part)
            start, mine = sum(rows[:at]), own[at]
            assert mine is not None
            return Pair(name, parameter.detach()[start : start + rows[at]], mine, mine.shape != loaded[name].shape)
    return None


def _slice(layer: Any, tensor: torch.Tensor, *, first: bool = True) -> torch.Tensor | None:
    """Return the slice of a loaded tensor that this layer holds; None if vLLM would cut it in another way.

    `first` says whether the tensor is the first member of a fused parameter: keys and values follow the queries.
    """
    kinds = {kind.__name__ for kind in type(layer).__mro__}
    if _VOCABULARY in kinds:
        rows = layer.shard_indices
        return tensor[rows.org_vocab_start_index : rows.org_vocab_end_index] if tensor.dim() == 2 else tensor
    count, index = getattr(layer, "tp_size", 1), getattr(layer, "tp_rank", 0)
    if count == 1:
        return tensor
    if _COLUMNS in kinds:
        # A bias is added after the slices were summed, so every worker holds all of it.
        return _piece(tensor, 1, count, index) if tensor.dim() == 2 else tensor
    if not kinds & set(_ROWS):
        return tensor
    if _ROWS[0] in kinds and not first:
        # If there are fewer heads of keys than workers, several workers hold the same head.
        count, index = count // layer.num_kv_head_replicas, index // layer.num_kv_head_replicas
    return _piece(tensor, 0, count, index)


def _piece(tensor: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor | None:
    size, rest = divmod(tensor.shape[dim], count)
    return None if rest else tensor.narrow(dim, index * size, size)
