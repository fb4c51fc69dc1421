"""Mixtures of experts: the passes over a row go through the experts that its tokens were drawn with.

Where engine and trainer round differently, or weights are a few steps apart, routers may choose other experts for the
same token, and its log-probability jumps. With the recorded choice, the policy that is trained is the one that sampled,
up to rounding.
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
    """Inside, passes over this row, backward too, take the recorded experts; nothing is forced where there are none.

    Layers run as they are: what is forced is not the same from row to row, so there is nothing to compile once.
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
