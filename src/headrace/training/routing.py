"""Mixtures of experts: the passes over a row use the experts that were recorded when its tokens were sampled.

If engine and trainer round differently, or their weights are a few steps apart, routers may choose other experts for
the same token, and its log-probability jumps. With the recorded choice, the trained policy is the policy that sampled
the token, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from headrace.errors import ModelError, UserError
from headrace.models.experts import RoutingShape, routing_shape
from headrace.models.routing_replay import Forced, forcing
from headrace.training.compiled import uncompiled
from headrace.training.packing import MicroBatch
from headrace.training.sharding import input_device

_shapes: WeakKeyDictionary[Any, RoutingShape | None] = WeakKeyDictionary()


@contextmanager
def following(model: Any, row: MicroBatch) -> Iterator[Forced | None]:
    """Make passes over this row, backward passes included, use the recorded experts inside this context.

    If the row has no record, nothing is forced. Layers run uncompiled inside, because the forced experts differ from
    row to row.
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
        with uncompiled(model), forcing(model, shape, row.routing, input_device(model)) as forced:
            yield forced
    except ModelError as error:
        raise UserError(f"{error} ([rollouts] keep_routing = false trains without the record)") from error
