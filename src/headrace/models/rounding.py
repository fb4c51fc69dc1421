"""Weights rounded to fewer bits: a frozen base model in 4 bits, and a model that computes as if its weights had 16.

In 4 bits, each block of 64 weights has one maximum, and a weight is one of 16 levels times that maximum. The levels are
those of NF4, which are equally likely for normally distributed weights. Rounding is a function of the float32 weights
alone. So trainer and engines hold the same numbers, the trainer in 4 bits and the engines dense.

Inside `rounded`, every module computes with its own parameters rounded to a dtype and back, one module at a time, so
there is no second copy of the weights. The parameters are restored when the pass of their module ends, also after an
error. The trainer thus computes what an engine with such weights computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

BLOCK = 64
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@torch.no_grad()
def round_weights(layers: Mapping[str, nn.Linear], sources: Mapping[str, nn.Linear] | None = None) -> None:
    """Round the weights of these layers, in place, to values that 4 bits can hold.

    `sources` are the same layers in float32, if `layers` are in another dtype: the rounding always starts from float32.
    """
    for name, layer in layers.items():
        weight = (sources or layers)[name].weight.float()
        layer.weight.copy_(_unpacked(*_packed(weight), weight.shape))


@torch.no_grad()
def hold_in_four_bits(model: nn.Module, layers: Mapping[str, nn.Linear]) -> None:
    """Replace these layers by layers that hold the weights in 4 bits. The new layers are frozen."""
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, FourBitLinear(layer))


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose dense weights exist only while a pass needs them, in the backward pass too."""

    packed: torch.Tensor
    scales: torch.Tensor
    pairs: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # other code sees an nn.Linear, but there is no weight parameter
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.rounding: torch.dtype | None = None
        """The dtype to which weights are rounded once more before use, see `rounded`."""
        self._slice = [0, 0, self.out_features]
        """The dimension of the weights that is cut, the first index of the slice, and its length; see `keep_slice`."""
        packed, scales = _packed(layer.weight.detach().float())
        # The buffers are not saved or published: a checkpoint and an engine know the base model by its files. They are
        # kept as integers, because a cast of the module would round floating-point buffers.
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scales", scales.view(torch.int32), persistent=False)
        self.register_buffer("pairs", _pairs(packed.device).view(torch.int32), persistent=False)
        self.bias = layer.bias

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weights, [out, in], in float32."""
        return _unpacked(self.packed, self.scales, (self.out_features, self.in_features), self.pairs)

    def keep_slice(self, dim: int, index: int, count: int) -> None:
        """Compute from now on with slice `index` of `count` along a dimension of the weights, [out, in].

        Slices of outputs (dimension 0) give parts of the layer's result, to be joined one after the other. Slices of
        inputs (dimension 1) give terms whose sum is the layer's result. All weights are still held.
        """
        length = (self.out_features, self.in_features)[dim] // count
        self._slice = [dim, index * length, length]
        if self.bias is not None:
            bias = self.bias.detach().clone()
            own = bias[index * length :][:length] if dim == 0 else bias * float(index == 0)
            self.bias = nn.Parameter(own, requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute the same as `nn.Linear`, in the dtype of the input."""
        held = self.packed, self.scales, self.pairs, self.out_features, self.in_features, self._slice
        output: torch.Tensor = _linear(input, *held, self.bias, self.rounding)
        return output


# Opaque to the compiler, which would keep the unpacked weight in memory from the forward to the backward pass.
@torch.library.custom_op("headrace::four_bit_linear", mutates_args=())
def _linear(
    hidden: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    pairs: torch.Tensor,
    rows: int,
    columns: int,
    part: Sequence[int],
    bias: torch.Tensor | None,
    rounding: torch.dtype | None,
) -> torch.Tensor:
    weight = _unpacked(packed, scales, (rows, columns), pairs).narrow(*part)
    return nn.functional.linear(hidden, weight.to(rounding or hidden.dtype).to(hidden.dtype), bias)


@_linear.register_fake
def _(
    hidden: Any, packed: Any, scales: Any, pairs: Any, rows: int, columns: int, part: Any, bias: Any, rounding: Any
) -> Any:
    return hidden.new_empty(*hidden.shape[:-1], part[2] if part[0] == 0 else rows)


@torch.library.custom_op("headrace::four_bit_linear_backward", mutates_args=())
def _linear_backward(
    gradient: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    pairs: torch.Tensor,
    rows: int,
    columns: int,
    part: Sequence[int],
) -> torch.Tensor:
    return gradient @ _unpacked(packed, scales, (rows, columns), pairs).narrow(*part).to(gradient.dtype)


@_linear_backward.register_fake
def _(gradient: Any, packed: Any, scales: Any, pairs: Any, rows: int, columns: int, part: Any) -> Any:
    return gradient.new_empty(*gradient.shape[:-1], part[2] if part[0] == 1 else columns)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, packed, scales, pairs, *ctx.shape, _, rounding = inputs
    if rounding is not None:
        raise ValueError("weights that are rounded once more have no gradients")
    ctx.save_for_backward(packed, scales, pairs)


def _gradients(ctx: Any, gradient: torch.Tensor) -> Any:
    return _linear_backward(gradient, *ctx.saved_tensors, *ctx.shape), *[None] * 8


_linear.register_autograd(_gradients, setup_context=_setup)


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the level numbers, two to a byte, and the largest magnitude of each block."""
    flat = weight.reshape(-1)
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    shares = blocks / torch.where(scales == 0, 1.0, scales)[:, None]
    numbers = torch.bucketize(shares, between, out_int32=True).to(torch.uint8).view(-1, 2)
    return numbers[:, 0] | (numbers[:, 1] << 4), scales


def _pairs(device: torch.device) -> torch.Tensor:
    """Return the two levels that each byte stands for, [256, 2]."""
    levels = torch.tensor(LEVELS, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([levels[byte & 15], levels[byte >> 4]], 1)


def _unpacked(
    packed: torch.Tensor, scales: torch.Tensor, shape: Sequence[int], pairs: torch.Tensor | None = None
) -> torch.Tensor:
    table = _pairs(packed.device) if pairs is None else pairs.view(torch.float32)
    values = table.index_select(0, packed.int()).view(-1, BLOCK) * scales.view(torch.float32)[:, None]
    rows, columns = shape
    return values.view(-1)[: rows * columns].view(rows, columns)


@contextmanager
def rounded(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Make passes inside this context see weights of this dtype. Not for gradients."""
    with ExitStack() as stack:
        for module in model.modules():
            own = any(p.is_floating_point() and p.dtype != dtype for p in module.parameters(recurse=False))
            if isinstance(module, FourBitLinear):
                module.rounding = dtype
                stack.callback(setattr, module, "rounding", None)
            if own:
                rounding = _Rounding(dtype)
                stack.callback(module.register_forward_pre_hook(rounding.begin).remove)
                stack.callback(module.register_forward_hook(rounding.end, always_call=True).remove)
        yield


class _Rounding:
    """The parameters that one module has in its pass, and the values that they have outside the pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def begin(self, module: nn.Module, inputs: Any) -> None:
        # Looked up here, because a sharded module has other parameters in its pass: those that were gathered for it.
        # They are changed in place: with tensor parallelism a parameter is a DTensor, which only wraps this memory.
        held = [p for p in module.parameters(recurse=False) if p.is_floating_point()]
        parts = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in held]
        self._own = [(part, part.clone()) for part in parts]
        for part, own in self._own:
            part.copy_(own.to(self._dtype))

    @torch.no_grad()
    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for part, own in self._own:
            part.copy_(own)
        self._own = []
