"""Mixtures of experts: the passes over a row use the experts that were recorded when its tokens were sampled.

If engine and trainer round differently, or their weights are a few steps apart, routers may choose other experts for
the same token, and its log-probability jumps. With the recorded choice, the trained policy is the policy that sampled
the token, up to rounding. The record decides which experts run, and the model's own router how much each counts.

The code of the router is not changed. A router chooses experts by one call of `topk`; inside `forcing` this call
returns the experts of the record. A router that chooses in another way, or by several calls, raises a `ModelError`. So
a pass inside `forcing` never uses other experts than the recorded ones without an error.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from headrace.errors import ModelError, UserError
from headrace.models.experts import RoutingShape, experts_modules, routing_shape
from headrace.training.devices import input_device
from headrace.training.layers import uncompiled
from headrace.training.rows import MicroBatch
from headrace.types import NO_EXPERT

_TOPK = (torch.topk, torch.Tensor.topk)
_WRAPPED = re.compile(r"\.(base_layer|original_module)(?=\.|$)")
"""The names under which peft puts a module that it adapts or trains in full."""

Forced = dict[int, torch.Tensor]
"""For each column of the record, which tokens [T] had another choice forced on them in the last pass."""

_shapes: WeakKeyDictionary[Any, RoutingShape | None] = WeakKeyDictionary()


@contextmanager
def following(model: Any, row: MicroBatch) -> Iterator[Forced | None]:
    """Make passes over this row, backward passes included, use the recorded experts inside this context.

    If the row has no record, nothing is forced. Layers run uncompiled inside the context, because the forced
    experts differ from row to row.
    """
    if row.routing is None:
        yield None
        return
    if model not in _shapes:
        _shapes[model] = routing_shape(model)
    shape = _shapes[model]
    try:
        if shape is None:
            raise ModelError("experts were recorded, and this model has none")
        with uncompiled(model), forcing(model, shape, row.routing) as forced:
            yield forced
    except ModelError as error:
        raise UserError(f"{error} ([rollouts] keep_routing = false trains without the record)") from error


@contextmanager
def forcing(model: Any, shape: RoutingShape, routing: np.ndarray[Any, Any] | torch.Tensor) -> Iterator[Forced]:
    """Force the experts of `routing` [T, layers, k] on every pass inside this context. Each pass must have T tokens.

    Where the record is `NO_EXPERT`, the router chooses. With activation checkpointing the backward pass must be inside
    the context too, because it computes the layers again.
    """
    record = _checked(shape, torch.as_tensor(routing)).to(input_device(model), torch.int64, non_blocking=True)
    forced: Forced = {}
    with ExitStack() as stack:
        for column, path in enumerate(experts_modules(model)):
            # The router and its choice are somewhere in the block that holds the experts.
            block = model.get_submodule(_WRAPPED.sub("", path).rpartition(".")[0])
            stack.enter_context(_forced_block(block, record[:, column], shape.experts, forced, column))
        yield forced


def _checked(shape: RoutingShape, routing: torch.Tensor) -> torch.Tensor:
    if not shape.recorded:
        raise ModelError("this model's experts cannot be forced: it routes outside of transformers' interface")
    if routing.ndim != 3 or routing.shape[1:] != (len(shape.layers), shape.per_token):
        raise ValueError(f"a record of {tuple(routing.shape)} is not [tokens, {len(shape.layers)}, {shape.per_token}]")
    free = routing == NO_EXPERT
    known = (routing >= 0) & (routing < shape.experts)
    if not (free.all(-1) | known.all(-1)).all():
        raise ValueError(f"a record holds numbers that are not those of {shape.experts} experts")
    return routing


@contextmanager
def _forced_block(
    block: torch.nn.Module, record: torch.Tensor, experts: int, forced: Forced, column: int
) -> Iterator[None]:
    inner = block.forward
    patched = vars(block).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        # The block itself enters the mode, so that a pass repeated on another thread (checkpointing) is forced as well.
        with _Choice(record, experts) as choice:
            output = inner(*args, **kwargs)
        if len(choice.changed) != 1:
            made = len(choice.changed)
            raise ModelError(
                f"{type(block).__name__} chose its experts by {made} topk calls, not one: they cannot be forced"
            )
        [forced[column]] = choice.changed
        return output

    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if patched is not None:
            block.forward = patched


class _Choice(TorchFunctionMode):
    """The mode that answers the topk over all experts from the record, and notes what each of these calls changed."""

    def __init__(self, forced: torch.Tensor, experts: int) -> None:
        super().__init__()
        self.changed: list[torch.Tensor] = []
        self._forced = forced
        self._experts = experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Return the call's own result, except for a choice of experts or of their groups."""
        kwargs = kwargs or {}
        if func not in _TOPK:
            return func(*args, **kwargs)
        return self._topk(*args, **kwargs)

    def _topk(self, input: torch.Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
        width = input.shape[-1]
        over_experts = width == self._experts and k == self._forced.shape[1]
        over_groups = width < self._experts and self._experts % width == 0
        if input.ndim != 2 or dim not in (-1, 1) or not (over_experts or over_groups):
            return torch.topk(input, k, dim, **kwargs)
        if input.shape[0] != self._forced.shape[0]:
            raise ValueError(f"a pass of {input.shape[0]} tokens is forced by a record of {self._forced.shape[0]}")
        if over_experts:
            own = torch.topk(input, k, dim, **kwargs).indices
            index = torch.where(self._forced >= 0, self._forced, own)
            # The choices are compared as sets, because the order in which a router names its experts means nothing.
            self.changed.append((own.sort(1).values != index.sort(1).values).any(1))
        else:
            index = torch.topk(self._with_forced_groups(input), k, dim, **kwargs).indices
        return torch.return_types.topk((input.gather(1, index), index))

    def _with_forced_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of the groups, with infinity for every group that has a forced expert.

        Some routers first choose groups of experts, and then experts only within the chosen groups. So the groups of
        all forced experts must be among the chosen ones.
        """
        groups = scores.shape[1]
        # Tokens without a record point to one extra column, which is cut off again.
        group = torch.where(self._forced >= 0, self._forced // (self._experts // groups), groups)
        held = scores.new_zeros(scores.shape[0], groups + 1, dtype=torch.bool).scatter(1, group, True)[:, :groups]
        return scores.detach().masked_fill(held, float("inf"))
