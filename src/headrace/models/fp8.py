"""Linear layers in FP8: the weights are rounded once, the inputs in every pass, and both are multiplied as they are.

A row of a matrix is divided by its own scale, so that its largest magnitude becomes the largest number of FP8
(e4m3), and is then rounded. A row of weights belongs to one output, and a row of inputs to one token. Rounding is a
function of the row alone, so the same weights always give the same FP8 numbers on one device, whatever else is rounded
with them.

A GPU multiplies the FP8 numbers themselves. Elsewhere the same numbers are multiplied in float32. Embeddings, norms,
routers, experts and the vocabulary projection are not rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from headrace.errors import ModelError, UserError

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest number of FP8 (e4m3)."""
MULTIPLE = 16
"""FP8 products on a GPU need numbers of inputs and outputs that are multiples of this."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same input. Their weights lie one after another, so one product serves all."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""The names of linear layers that choose experts. They are small, and a rounded choice would be another choice."""
SCALE = "weight_scale"
CHUNK = 1 << 24
"""The number of weights that are rounded at a time, because rounding needs several copies in float32."""


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a matrix in FP8, and the scale of each row in float32, [rows, 1].

    A row of zeros has scale 1. A row with a number that is not finite keeps a NaN.
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True) / MOST
    scales = torch.where(scales > 0, scales, 1.0)
    return (wide / scales).clamp(-MOST, MOST).to(FP8), scales


def through_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers rounded to FP8 without a scale, in their own dtype. Beyond its range they become its largest.

    Keys and values in an FP8 cache are rounded like this.
    """
    return numbers.clamp(-MOST, MOST).to(FP8).to(numbers.dtype)


def fp8_product(hidden: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return `hidden @ weights.t()` in the dtype of `hidden`, whose last dimension is rounded to FP8 token by token.

    The weights are `values` [outputs, inputs], which are FP8 numbers in any dtype, times `scales` [outputs].
    """
    rows, row_scales = quantize_rows(hidden.reshape(-1, hidden.shape[-1]))
    if values.is_cuda and values.dtype == FP8:
        product = torch._scaled_mm(
            rows, values.t(), row_scales, scales[None], out_dtype=torch.bfloat16, use_fast_accum=True
        )
    else:
        product = (rows.float() @ values.float().t()) * row_scales * scales
    return product.to(hidden.dtype).view(*hidden.shape[:-1], values.shape[0])


class Fp8Linear(nn.Linear):
    """A linear layer with FP8 weights under the name of the original weights, and their scales beside them."""

    weight_scale: torch.Tensor
    joined: torch.Tensor
    joined_scale: torch.Tensor

    def __init__(self, layer: nn.Linear, joined: torch.Tensor, joined_scale: torch.Tensor, first: int) -> None:
        """Round the weights of `layer` into rows `first` and following of `joined`, which siblings share."""
        nn.Module.__init__(self)  # other code sees an nn.Linear
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._first, self._last = first, first + layer.out_features
        self.weight = nn.Parameter(joined[first : self._last], requires_grad=False)
        self.register_buffer(SCALE, joined_scale[first : self._last])
        # Not persistent, because the same numbers are published under the names of their own layers.
        self.register_buffer("joined", joined, persistent=False)
        self.register_buffer("joined_scale", joined_scale, persistent=False)
        self.bias = layer.bias
        write_rows(layer.weight.detach(), self.weight.detach(), self.weight_scale)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what `nn.Linear` computes, with rounded weights and rounded inputs.

        Compiled, all siblings ask for the product with the weights of them all, which is then computed once (see
        `headrace.engines.embedded.projections`).
        """
        if torch.compiler.is_dynamo_compiling():
            output = fp8_product(input, self.joined, self.joined_scale)[..., self._first : self._last]
        else:
            output = fp8_product(input, self.weight, self.weight_scale)
        return output if self.bias is None else output + self.bias


def write_rows(weights: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Round weights [outputs, inputs], on any device, into `values` and `scales`."""
    step = max(1, CHUNK // weights.shape[1])
    for first in range(0, len(weights), step):
        part = slice(first, first + step)
        rounded, found = quantize_rows(weights[part].to(values.device))
        values[part].copy_(rounded)
        scales[part].copy_(found[:, 0])


@torch.no_grad()
def quantize_linears(model: Any) -> None:
    """Replace the linear layers of this model by layers in FP8. A model that has such layers is not changed.

    Raises `UserError` if the model's GPU cannot multiply FP8, and `ModelError` if no layer can be in FP8.
    """
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        return
    device = next(model.parameters()).device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise UserError(
            f'[engine] quantize = "fp8": {torch.cuda.get_device_name(device)} has no FP8 products (Ada and Hopper do)'
        )
    head, found = model.get_output_embeddings(), 0
    for parent in list(model.modules()):
        for names in _groups(parent, head):
            _replace(parent, names)
            found += 1
    if not found:
        raise ModelError(f'[engine] quantize = "fp8": {type(model).__name__} has no linear layer that can be in FP8')


def _groups(parent: nn.Module, head: object) -> Iterator[list[str]]:
    """Yield the names of this module's own layers that can be in FP8; siblings together."""
    left = [
        name
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child is not head
        and name not in ROUTERS
        and child.in_features % MULTIPLE == child.out_features % MULTIPLE == 0
    ]
    for siblings in SIBLINGS:
        together = [name for name in siblings if name in left]
        if len({_linear(parent, name).in_features for name in together}) == 1:
            yield together
            left = [name for name in left if name not in together]
    yield from ([name] for name in left)


def _linear(parent: nn.Module, name: str) -> nn.Linear:
    layer = getattr(parent, name)
    assert isinstance(layer, nn.Linear)
    return layer


def _replace(parent: nn.Module, names: Sequence[str]) -> None:
    layers = [_linear(parent, name) for name in names]
    outputs, device = sum(layer.out_features for layer in layers), layers[0].weight.device
    joined = torch.empty((outputs, layers[0].in_features), dtype=FP8, device=device)
    scales = torch.empty(outputs, dtype=torch.float32, device=device)
    first = 0
    for name, layer in zip(names, layers, strict=True):
        setattr(parent, name, Fp8Linear(layer, joined, scales, first))
        first += layer.out_features


class Fp8Arrivals:
    """How a version in the trainer's dtype becomes the tensors of a model with FP8 layers.

    `headrace.delivery.base.Conversion` says what the methods promise.
    """

    def __init__(self, model: nn.Module, live: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Describe the arrivals of this model, whose weights are `live`. `dtype` is that of weights before rounding."""
        rounded = {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
        self._scales = {f"{name}.weight": f"{name}.{SCALE}" for name in rounded}
        scales = set(self._scales.values())
        self.arriving = {
            name: torch.empty_like(tensor, device="meta", dtype=dtype if name in self._scales else None)
            for name, tensor in live.items()
            if name not in scales
        }

    @torch.no_grad()
    def convert(self, arrived: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        """Round the arrived weights into the tensors of `into`, and copy those that are not rounded."""
        for name, tensor in arrived.items():
            if name in self._scales:
                write_rows(tensor, into[name], into[self._scales[name]])
            else:
                into[name].copy_(tensor, non_blocking=True)


def fp8_arrivals(model: nn.Module, live: Mapping[str, torch.Tensor]) -> Fp8Arrivals | None:
    """Return how versions become the weights of this model; None if it has no layer in FP8."""
    if not any(isinstance(module, Fp8Linear) for module in model.modules()):
        return None
    plain = next(p for p in model.parameters() if p.is_floating_point() and p.dtype != FP8)
    return Fp8Arrivals(model, live, plain.dtype)
