"""Prepares a model and the interpreter to serve: it chooses the runner and the size of the KV cache.

A model on a GPU gets the GPU's runner. Its layers are compiled too, unless `[engine] compile` is off.
"""

import gc
import logging
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.config.schema import EngineConfig
from headrace.engines.embedded.base import Runner
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.projections import (
    compile_after,
    fuse_projections,
    merge_equal_products,
    prepare_to_merge,
)
from headrace.engines.embedded.runner import HostRunner
from headrace.errors import UserError
from headrace.models.attention import prepare_to_compile
from headrace.models.experts import RoutingShape, prepare_experts
from headrace.models.fp8 import FP8
from headrace.models.head import keep_logits_in_float32

logger = logging.getLogger(__name__)

NEW_OBJECTS = 100_000
"""The number of new objects that triggers a garbage collection. A decode step makes about ten objects for each running
sequence, and frees them again."""
SWITCH_SECONDS = 5e-4
"""The longest time that a thread which stages weights may keep the interpreter from the thread that decodes."""

CANARY_LENGTH = 16
"""The length of the sequence that is scored once before an engine serves, in tokens."""

ChangeGraph = Callable[[torch.fx.GraphModule], object]
"""Changes the graph of a layer before it is compiled."""
MakeRunner = Callable[[Any, EngineConfig, int, int], tuple[Runner, BlockPool]]
"""Makes a runner and its block pool from a model, the engine's configuration, the longest length, and the bytes of a
GPU that the cache must leave to staged weights."""


def make_runner(model: Any, config: EngineConfig, max_length: int, staged: int) -> tuple[Runner, BlockPool]:
    """Return the runner for this model and the pool of its cache blocks."""
    if next(model.parameters()).device.type == "cuda":
        return make_device_runner(model, config, max_length, staged)
    return make_host_runner(model, config, max_length)


def make_host_runner(
    model: Any, config: EngineConfig, max_length: int, staged: int = 0, *, pack: bool = True
) -> tuple[Runner, BlockPool]:
    """Return the host's runner, which computes with plain torch, on any device. Its results are there at once.

    Without `pack`, layers are computed from the weights where they lie, without packed copies.
    """
    blocks = wanted_blocks(config, max_length)
    routing = _recorded(prepare_experts(model))
    runner = HostRunner(model, blocks, config.block_size, routing, rounds_kv=config.kv_dtype == "fp8", pack=pack)
    return runner, BlockPool(blocks, config.block_size)


def cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of cached keys and values on a GPU, for a model that computes in `dtype`."""
    return FP8 if config.kv_dtype == "fp8" else dtype


def wanted_blocks(config: EngineConfig, max_length: int) -> int:
    """Return the number of blocks that is configured, or that `slots` sequences of the longest length need."""
    return -(-config.cache_tokens // config.block_size) or config.slots * -(-max_length // config.block_size)


def make_device_runner(model: Any, config: EngineConfig, max_length: int, staged: int = 0) -> tuple[Runner, BlockPool]:
    """Return the GPU's runner. If the model is not on a GPU, Triton's interpreter must run the kernels."""
    # Imported here, because Triton is needed only with a GPU, and may be installed only there.
    from headrace.engines.embedded.device.experts import choose_products
    from headrace.engines.embedded.device.routing import replace_topk
    from headrace.engines.embedded.device.runner import DeviceRunner
    from headrace.engines.embedded.device.state import DeviceCache, affordable_blocks, layer_shapes

    parameter = next(model.parameters())
    routing = _recorded(prepare_experts(model, choose_products) if config.expert_kernels else prepare_experts(model))
    keep_logits_in_float32(model)
    fused = config.compile and config.fuse_projections and bool(fuse_projections(model))
    changes: list[ChangeGraph] = []
    if fused or config.quantize == "fp8":
        prepare_to_merge()
        changes.append(merge_equal_products)
    if routing is not None and config.router_kernel:
        changes.append(replace_topk)
    compiled = _compile_layers(model, changes) if config.compile else None
    if config.compile and compiled is None:
        logger.warning("layers run uncompiled: %s has no list of layers", type(model).__name__)
    try:
        shapes = layer_shapes(model)  # This runs the layers once, so it also compiles them.
    except RuntimeError as error:
        if compiled is None:
            raise
        logger.warning("layers run uncompiled: %s", str(error).strip().splitlines()[0])
        for layer in compiled:
            layer.__dict__.pop("forward", None)
        shapes = layer_shapes(model)
    blocks, stored = wanted_blocks(config, max_length), cache_dtype(config, parameter.dtype)
    if parameter.device.type == "cuda":
        affordable = affordable_blocks(
            parameter.device, shapes, config.block_size, stored.itemsize, config.memory_fraction, staged
        )
        if config.cache_tokens and blocks > affordable:
            raise UserError(
                f"[engine] cache_tokens = {config.cache_tokens} do not fit:"
                f" there is memory for {affordable * config.block_size} (0 takes what fits)"
            )
        blocks = min(blocks, affordable)
    cache = DeviceCache(shapes, blocks, config.block_size, stored, parameter.device)
    runner = DeviceRunner(
        model, cache, rows=config.slots, max_length=max_length, capture=config.graphs, routing=routing
    )
    if parameter.device.type == "cuda":
        # Compile and capture the scoring pass now. Otherwise the canary of the first swap would stop decoding for it.
        with runner.active():
            runner.score(np.zeros(min(CANARY_LENGTH, max_length), np.int32), again=True).result()
    return runner, BlockPool(blocks, config.block_size)


def _recorded(shape: RoutingShape | None) -> RoutingShape | None:
    return shape if shape is not None and shape.recorded else None


def _compile_layers(model: Any, changes: list[ChangeGraph]) -> torch.nn.ModuleList | None:
    """Compile every decoder layer in place, lazily, and return the layers; None if the model has no list of layers.

    One compilation serves all layers of a kind and all batch sizes. Attention is opaque to the compiler. The compiler
    fuses the rest: norms, rotary embeddings, activations and residuals. `changes` are made to a graph before it is
    compiled.
    """
    layers = getattr(model.get_decoder() if hasattr(model, "get_decoder") else model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return None
    prepare_to_compile(model)
    how: dict[str, Any] = {"backend": compile_after(*changes)} if changes else {}
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, **how)
    return layers


def give_way_to_decoding() -> None:
    """Make garbage collection rare and thread switches quick.

    Objects that exist now are frozen, so the collector never visits them again. Call this after the model is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(SWITCH_SECONDS)
