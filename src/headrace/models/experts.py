"""One experts function, registered with transformers, that records which experts each token went to.

The record is the very index tensor that the products are computed with, so the record cannot differ from what ran.
Recording does not wait for the host, so it also works inside a compiled layer and a captured graph.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import grouped_mm
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from headrace.errors import ModelError
from headrace.models.attention import COLUMN, number_of

EXPERTS = "headrace"
"""The name for `model.set_experts_implementation(EXPERTS)`, which `prepare_experts` calls."""

PRODUCTS = "headrace_products"
"""The attribute of an experts module that holds its `ExpertProducts`, if it has other products than torch's."""
_DISPATCHED = ("is_transposed", "has_gate", "has_bias")
"""The attributes that transformers' decorator leaves on a module that it dispatches. There is no common base class."""
_ROUTING_CLASS = re.compile(r"(Experts?|Router|Gating|MoE|Moe|Mo[eE]Block)$")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_TRAINED_IN_FULL = ".modules_to_save."
_MOST_EXPERTS = torch.iinfo(torch.int16).max
_BLOCK = 8
"""How many experts are computed at once when all are. It is the same in every pass, as compiled layers require."""


Activate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RoutingShape:
    """The routing layout of a model: a record of T tokens is [T, len(layers), per_token], numbers below `experts`."""

    layers: tuple[int, ...]
    """The decoder layers that route, in ascending order. Empty where they cannot be known."""
    per_token: int
    experts: int
    recorded: bool = True
    """False for models that route outside transformers' experts interface: served, but never recorded."""


class ExpertWeights(NamedTuple):
    """The weights of one layer's experts, as Hugging Face stores them: E experts, hidden size H, inner size I."""

    up: torch.Tensor
    """Gate and up: `[E, 2 * I, H]`, or `[E, H, 2 * I]` if transposed. Without a gate, I takes the place of 2 * I."""
    up_bias: torch.Tensor | None
    down: torch.Tensor
    """`[E, H, I]`, or `[E, I, H]` if transposed."""
    down_bias: torch.Tensor | None
    transposed: bool


class ExpertProducts(Protocol):
    """Computes the experts of a layer in place of torch's grouped products."""

    def __call__(
        self,
        experts: ExpertWeights,
        hidden: torch.Tensor,
        index: torch.Tensor,
        weights: torch.Tensor,
        column: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [T, H]. `index` and `weights` are [T, k].

        With `column`, a number in host memory, `record_routing` must be called with it and with `index`.
        """


class RoutingRecorder:
    """The recorder of the experts of the current pass: row t of `chosen` belongs to token t of the pass.

    Rows from an earlier pass are overwritten. The buffer is allocated once and never replaced, so a captured graph
    keeps writing where the host reads.
    """

    def __init__(self, shape: RoutingShape, tokens: int, device: torch.device | str) -> None:
        if not shape.recorded:
            raise ModelError("this model's experts cannot be recorded: it routes outside of transformers' interface")
        self.shape = shape
        self.chosen = torch.zeros(tokens, len(shape.layers), shape.per_token, dtype=torch.int16, device=device)

    def write(self, column: int, index: torch.Tensor) -> None:
        """Store the experts of one layer, [T, k], in rows 0..T-1."""
        tokens, per_token = index.shape
        if tokens > self.chosen.shape[0] or per_token != self.shape.per_token:
            raise ValueError(f"{tokens} tokens of {per_token} experts do not fit into {tuple(self.chosen.shape)}")
        self.chosen[:tokens, column].copy_(index)


_recorder: ContextVar[RoutingRecorder | None] = ContextVar("headrace_routing", default=None)


@contextmanager
def recording(recorder: RoutingRecorder | None) -> Iterator[None]:
    """Make every pass inside this context write its experts into this recorder, if there is one."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def prepare_experts(
    model: Any, choose_products: Callable[[Any], ExpertProducts | None] = lambda module: None
) -> RoutingShape | None:
    """Route this model's experts through Headrace. Return its routing layout, or None for a dense model.

    `choose_products` gets each experts module. Where it returns None, torch's grouped products are used.
    """
    shape, modules = routing_shape(model), experts_modules(model)
    if shape is None or not modules:
        return shape
    model.set_experts_implementation(EXPERTS)
    if not all(module.config._experts_implementation == EXPERTS for module in modules.values()):
        shape = replace(shape, recorded=False)
    for module in modules.values():
        setattr(module, PRODUCTS, choose_products(module))
    if shape.recorded:
        for column, module in enumerate(modules.values()):
            setattr(module, COLUMN, column)
    return shape


def routing_shape(model: Any) -> RoutingShape | None:
    """Return the routing layout of a model, or None for a dense model. The model is not changed."""
    config = model.config.get_text_config()
    experts, per_token = _first(config, _EXPERT_COUNTS) or 0, _first(config, _EXPERTS_PER_TOKEN) or 0
    modules = experts_modules(model)
    if not modules:
        # The test is by class, because a configuration may mention experts that no layer has.
        if not any(_ROUTING_CLASS.search(type(module).__name__) for module in model.modules()):
            return None
        return RoutingShape(layers=(), per_token=per_token, experts=experts, recorded=False)
    layers = _layers_of(modules)
    counts = {int(module.num_experts) for module in modules.values()}
    told = bool(layers and per_token and len(counts) == 1 and max(counts) <= _MOST_EXPERTS)
    return RoutingShape(layers=layers, per_token=per_token, experts=max(counts), recorded=told)


def experts_modules(model: torch.nn.Module) -> dict[str, Any]:
    """Return the modules that transformers dispatches through its experts interface, by path, in a record's order."""
    return {
        path: module
        for path, module in model.named_modules()
        if all(name in vars(module) for name in _DISPATCHED) and hasattr(module, "down_proj")
        if _TRAINED_IN_FULL not in path  # not the copy that peft trains in full
    }


def _layers_of(modules: dict[str, Any]) -> tuple[int, ...]:
    """Return the layer of each experts module, ascending. Empty if a layer is not known, or routes more than once."""
    # The layer's number is the first number in the path: `model.layers.3.mlp.experts`.
    numbers = [[int(part) for part in path.split(".") if part.isdecimal()] for path in modules]
    layers = tuple(found[0] for found in numbers if found)
    return layers if len(layers) == len(modules) and layers == tuple(sorted(set(layers))) else ()


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int)), None)


@torch.library.custom_op("headrace::record_routing", mutates_args=())
def _record_routing(index: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    # The returned index is used by the products, so a compiler can neither drop nor move the recording.
    record_routing(index, int(column))
    return index.clone()


@_record_routing.register_fake
def _(index: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(index)


def record_routing(index: torch.Tensor, column: int) -> None:
    """Store the experts of one layer, [T, k], in the current recorder, if there is one."""
    if (recorder := _recorder.get()) is not None:
        recorder.write(column, index)


def _experts(module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's experts, [T, H]. This is transformers' experts interface."""
    experts = weights_of(module)
    if top_k_weights.shape != top_k_index.shape:
        raise ModelError(f"{type(module).__name__} weighs its experts in a form that is not known: it cannot be served")
    products: ExpertProducts | None = getattr(module, PRODUCTS, None)
    column = None
    if torch.compiler.is_compiling():
        column = number_of(module, COLUMN)
        if column is not None and products is None:
            # The operation is opaque to the compiler, so one compiled layer serves passes with and without a recorder.
            top_k_index = _record_routing(top_k_index, column)
    elif hasattr(module, COLUMN):
        record_routing(top_k_index, getattr(module, COLUMN))
    if products is not None:
        return products(experts, hidden, top_k_index, top_k_weights, column)
    activate = module._apply_gate if module.has_gate else module.act_fn
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    compute = grouped_products if can_group(experts, hidden) else _every_expert
    return compute(experts, hidden, top_k_index, top_k_weights, activate, norm).to(hidden.dtype)


def weights_of(module: Any) -> ExpertWeights:
    """Return the weights of an experts module."""
    return ExpertWeights(
        up=module.gate_up_proj if module.has_gate else module.up_proj,
        up_bias=(module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None,
        down=module.down_proj,
        down_bias=module.down_proj_bias if module.has_bias else None,
        transposed=module.is_transposed,
    )


def can_group(experts: ExpertWeights, hidden: torch.Tensor) -> bool:
    """Return whether torch's grouped product can take these tensors. Where it has no kernel, it waits for the host."""
    if hidden.dtype != experts.up.dtype or hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if any(size * hidden.element_size() % 16 for weight in (experts.up, experts.down) for size in weight.shape[1:]):
        return False
    if hidden.dtype == torch.bfloat16:
        return True
    return not torch.compiler.is_compiling() and not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())


def grouped_products(
    experts: ExpertWeights,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    activate: Activate,
    norm: Activate | None = None,
) -> torch.Tensor:
    """Sort the pairs of token and expert by expert, and compute one product per expert over its range of pairs."""
    tokens, per_token = index.shape
    expert, order = torch.sort(index.reshape(-1).to(torch.int16), stable=True)  # narrow keys sort in fewer rounds
    numbers = torch.arange(experts.up.shape[0], device=expert.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)
    inner = grouped_mm(hidden[order // per_token], _input_first(experts, experts.up), offs=ends)
    if experts.up_bias is not None:
        inner = inner + experts.up_bias[expert.int()]
    outer = grouped_mm(activate(inner), _input_first(experts, experts.down), offs=ends)
    if experts.down_bias is not None:
        outer = outer + experts.down_bias[expert.int()]
    outer = (norm(outer) if norm is not None else outer) * weights.reshape(-1)[order, None]
    # The results go back to the order of tokens, where the sum over a token's experts has a fixed order: no atomics.
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return outer[back].view(tokens, per_token, outer.shape[-1]).sum(1)


def _every_expert(
    experts: ExpertWeights,
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    activate: Activate,
    norm: Activate | None,
) -> torch.Tensor:
    """Compute every expert over every token, for tensors that the grouped product cannot take. Most of it is unused."""
    count = experts.up.shape[0]
    spread = weights.new_zeros((index.shape[0], count)).scatter_add(1, index, weights).t()[..., None]
    total = torch.zeros_like(hidden)
    for start in range(0, count, _BLOCK):
        part = slice(start, start + _BLOCK)
        inner = torch.matmul(hidden, _input_first(experts, experts.up[part]))
        if experts.up_bias is not None:
            inner = inner + experts.up_bias[part, None]
        outer = torch.bmm(activate(inner), _input_first(experts, experts.down[part]))
        if experts.down_bias is not None:
            outer = outer + experts.down_bias[part, None]
        outer = norm(outer) if norm is not None else outer
        # The result of an expert that was not chosen may overflow, and must not become 0 times infinity.
        outer = outer.masked_fill(spread[part] == 0, 0.0)
        total = total + (outer * spread[part]).sum(0)
    return total


def _input_first(experts: ExpertWeights, weight: torch.Tensor) -> torch.Tensor:
    return weight if experts.transposed else weight.transpose(-2, -1)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
