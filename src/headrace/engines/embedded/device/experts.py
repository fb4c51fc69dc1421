"""Chooses how the GPU's runner computes the experts of a layer: by its own kernels where the layer fits.

A layer fits if its experts are gated by a kind of swish. Which kind is found by a trial: the module's own activation
must give the same numbers. The kernels are for the few tokens of a decode step; the many tokens of a pass over prompts
go to torch's grouped products. To a compiler both are one opaque operation, so one compiled layer serves both.
"""

import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from headrace.engines.embedded.kernels.experts import UNLIMITED, Swish, expert_products
from headrace.models.experts import ExpertProducts, ExpertWeights, can_group, grouped_products, record_routing

logger = logging.getLogger(__name__)

FEW_TOKENS = 1024
"""The largest number of tokens that the kernels compute. More tokens keep torch's grouped products busy."""
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose_products(module: Any) -> ExpertProducts | None:
    """Return the kernels for this experts module, or None, with a line in the log, if it does not fit."""
    swish = find_swish(module)
    weights = [module.down_proj, *([module.gate_up_proj] if module.has_gate else [])]
    if swish is None or any(weight.dtype not in _DTYPES for weight in weights):
        _say_once(type(module).__name__)
        return None
    return products_of(swish)


@cache
def _say_once(name: str) -> None:
    logger.warning("the experts of %s are computed by torch: the kernels do not know their activation or dtype", name)


def find_swish(module: Any) -> Swish | None:
    """Return the swish that equals this module's activation, or None if no swish does."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    # All pairs of values on a grid that goes beyond the usual limits.
    values = torch.linspace(-12.0, 12.0, 25, device=module.down_proj.device)
    gate, up = (part.reshape(1, -1) for part in torch.meshgrid(values, values + 0.1, indexing="ij"))
    for swish in _candidates(module):
        inner = torch.stack((gate, up), -1).flatten(1) if swish.interleaved else torch.cat((gate, up), -1)
        if torch.allclose(module._apply_gate(inner), activate(swish, inner), rtol=1e-4, atol=1e-5):
            return swish
    return None


def _candidates(module: Any) -> Iterator[Swish]:
    limits = [float(found) for name in _LIMITS if (found := getattr(module, name, None)) is not None]
    alphas = [float(found) for name in _ALPHAS if (found := getattr(module, name, None)) is not None]
    for interleaved in (False, True):
        for limit in (UNLIMITED, *limits):
            yield Swish(limit=limit, interleaved=interleaved)
            for alpha in alphas:
                yield Swish(alpha, limit, 1.0, interleaved)


def activate(swish: Swish, inner: torch.Tensor) -> torch.Tensor:
    """Return the activation of gate and up, [..., 2 * I] -> [..., I], by torch."""
    gate, up = (inner[..., ::2], inner[..., 1::2]) if swish.interleaved else inner.chunk(2, -1)
    if swish[:3] == Swish()[:3]:
        return torch.nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=swish.limit), up.clamp(-swish.limit, swish.limit)
    return (up + swish.shift) * gate * torch.sigmoid(swish.alpha * gate)


@cache
def products_of(swish: Swish) -> ExpertProducts:
    """Return the products with this activation. Layers with equal activations share them, and so their compilation."""

    def products(
        experts: ExpertWeights,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        column: torch.Tensor | None,
    ) -> torch.Tensor:
        found: torch.Tensor = _opaque(hidden, index, weights, *experts, *swish, column)
        return found

    return products


@torch.library.custom_op("headrace::experts", mutates_args=())
def _opaque(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    up_bias: torch.Tensor | None,
    down: torch.Tensor,
    down_bias: torch.Tensor | None,
    transposed: bool,
    alpha: float,
    limit: float,
    shift: float,
    interleaved: bool,
    column: torch.Tensor | None,
) -> torch.Tensor:
    if column is not None:
        record_routing(index, int(column))
    experts = ExpertWeights(up, up_bias, down, down_bias, transposed)
    swish = Swish(alpha, limit, shift, interleaved)
    given = hidden.to(up.dtype).contiguous()
    if len(given) <= FEW_TOKENS or not can_group(experts, given):
        found = expert_products(experts, swish, given, index, weights)
    else:
        found = grouped_products(experts, given, index, weights, lambda inner: activate(swish, inner))
    return found.to(hidden.dtype)


@_opaque.register_fake
def _(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)
