"""How the matrices of a model are cut over tensor ranks, with the adapter beside them.

Tensor parallelism goes by the module names that most model families share: q/k/v/o, gate/up/down, embedding and head.
Matrices into heads and inner features are cut by output, matrices back are cut by input, and the vocabulary is cut by
token. Everything else (norms, routers, experts) is the same on every tensor rank and sees the same activations. A
family whose attention or feed-forward holds an unknown part is refused, because a slice that is mistaken for a whole
would train wrongly.

An adapter adds B(A(x)) to a matrix. If the matrix is cut by output, so is B; if it is cut by input, so is A. The other
one of the two is the same on every tensor rank, like a norm. Dropout leaves out the same inputs as on one rank.

A frozen matrix in 4 bits is whole on every rank, because its blocks of 64 weights do not end where slices end. Each
rank computes with its slice of the matrix.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from headrace.errors import ConfigError, ModelError
from headrace.models.rounding import FourBitLinear

Side = Literal["output", "input"]
"""The side of a matrix that is cut. Matrices are [output, input]."""
_HEADS_DIM = 2
"""The heads dimension of the norms of queries and keys: their input is [1, tokens, heads, head size]."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_HEAD_NORMS = ("q_norm", "k_norm")


def cut_model(model: Any, layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Cut a model, which every rank holds as a whole, into the slices of the tensor ranks, in place."""
    _check_sizes(model, mesh.size())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for layer in layers:
        parallelize_module(layer, mesh, layer_plan(layer, type(model).__name__), src_data_rank=None)
        for module in layer.modules():
            _cut_dropouts(module, mesh)
    _split_vocabulary(model, mesh)
    for name, parameter in model.named_parameters():
        # Norms that are the same on every rank would be trained from here on, whether they are frozen or not.
        parameter.requires_grad_(name not in frozen)


def layer_plan(layer: nn.Module, family: str) -> dict[str, ParallelStyle]:
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
            norm = SequenceParallel(sequence_dim=_HEADS_DIM, use_local_output=True)
            found |= {held: norm for held, _ in _held(path, module)}
        elif isinstance(_original(module), nn.Linear):
            found |= _linear_plan(path, module, "input" if name == "o_proj" else "output")
    for path, module in layer.named_modules():
        if isinstance(_original(getattr(module, "down_proj", None)), nn.Linear):
            _check_parts(module, _FEED_FORWARD, family)
            for name in _FEED_FORWARD:
                side: Side = "input" if name == "down_proj" else "output"
                found |= _linear_plan(f"{path}.{name}", module.get_submodule(name), side)
    return found


def _linear_plan(
    path: str, module: nn.Module, side: Side, outputs: Placement | None = None
) -> dict[str, ParallelStyle]:
    """Return how a linear layer, or what an adapter put in its place, is cut. Outputs stay cut, unless given."""
    dense = ColwiseParallel(output_layouts=outputs) if side == "output" else RowwiseParallel()
    found: dict[str, ParallelStyle] = {}
    for held, linear in _held(path, module):
        found[held] = _FourBitSlices(side) if isinstance(linear, FourBitLinear) else dense
    adapted = getattr(module, "lora_B" if side == "output" else "lora_A", {})
    return found | {f"{path}.lora_{'B' if side == 'output' else 'A'}.{name}": dense for name in adapted}


def _held(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that compute what a module of the model computes: itself, or those that peft put there."""
    own = dict(module.named_children())
    names: list[str] = [name for name in ("base_layer", "original_module") if name in own]
    names += [f"modules_to_save.{name}" for name in getattr(module, "modules_to_save", None) or {}]
    for name in names:
        yield f"{path}.{name}".removeprefix("."), module.get_submodule(name)
    if not names:
        yield path, module


def _original(module: Any) -> Any:
    """Return the model's own module, where peft has put another one around it."""
    return next(held for _, held in _held("", module)) if isinstance(module, nn.Module) else module


class _FourBitSlices(ParallelStyle):
    """Computes a slice of a layer in 4 bits on every rank. Inputs and outputs are those of the other styles."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self._side = side

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, FourBitLinear)
        module.keep_slice(0 if self._side == "output" else 1, device_mesh.get_local_rank(), device_mesh.size())
        if self._side == "output":
            module.register_forward_pre_hook(lambda _, inputs: (_with_summed_gradient(inputs[0], device_mesh),))
        else:
            module.register_forward_hook(lambda _, inputs, output: _summed(output, device_mesh))
        return module


def _with_summed_gradient(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the tensor. Its gradient becomes the sum of the gradients of all tensor ranks."""
    same = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return same.to_local(grad_placements=[Partial()])


def _summed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the tensors of all tensor ranks."""
    return DTensor.from_local(tensor, mesh, [Partial()], run_check=False).redistribute(mesh, [Replicate()]).to_local()


class SlicedDropout(nn.Dropout):
    """Dropout on a rank's slice of the inputs. What is dropped is drawn for all inputs, as one rank draws it."""

    def __init__(self, p: float, index: int, count: int) -> None:
        super().__init__(p)
        self._index, self._count = index, count

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply dropout to the slice `input`, whose last dimension is one of `count` slices."""
        if not self.training:
            return input
        whole = input.new_empty(*input.shape[:-1], input.shape[-1] * self._count).bernoulli_(1 - self.p)
        kept: torch.Tensor = whole.div_(1 - self.p).chunk(self._count, -1)[self._index]
        return input * kept


def _cut_dropouts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the dropouts of an adapted layer whose inputs are cut."""
    dropouts: Any = getattr(module, "lora_dropout", {})
    for name, inward in getattr(module, "lora_A", {}).items():
        cut = isinstance(inward.weight, DTensor) and inward.weight.placements == (Shard(1),)
        if cut and isinstance(dropouts[name], nn.Dropout):
            dropouts[name] = SlicedDropout(dropouts[name].p, mesh.get_local_rank(), mesh.size()).train(module.training)


def _check_parts(module: nn.Module, known: Sequence[str], family: str) -> None:
    for name, _ in module.named_parameters():
        if name.split(".")[0] not in known:
            raise _no_plan(family, f"{name} in {type(module).__name__}")
    needed = [name for name in known if name not in _HEAD_NORMS]
    if missing := [name for name in needed if not isinstance(_original(getattr(module, name, None)), nn.Linear)]:
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
    for _, held in _held("", embedding):
        parallelize_module(held, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if tied:
        # Both are cut by token, so they share the part. They are tied again before the head's weight is cut too.
        head.weight = embedding.weight
    for path, style in _linear_plan("", head, "output", Replicate()).items():
        parallelize_module(head.get_submodule(path.removeprefix(".")), mesh, style, src_data_rank=None)
    if tied:
        head.weight = embedding.weight


def _no_plan(family: str, why: str) -> ModelError:
    return ModelError(f"{family} cannot be trained with [training] tensor_parallel > 1: it has {why}")
