"""The choice of where an embedded engine stages new weights, from the memory that its device has left."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from headrace.config.schema import EngineConfig
from headrace.config.staging import StagingChoice, chosen_staging
from headrace.engines.embedded.setup import cache_dtype, wanted_blocks
from headrace.models.experts import prepare_experts


def choose_staging(
    model: Any,
    config: EngineConfig,
    max_length: int,
    live: Mapping[str, torch.Tensor],
    arriving: Mapping[str, torch.Tensor] | None = None,
) -> StagingChoice:
    """Choose where this engine stages versions of its live weights. Call this before the layers are compiled.

    Versions that are `arriving` in another form are staged twice: in that form, and on the engine's device as they
    become live.
    """
    weights, converted = _bytes(live if arriving is None else arriving), 0 if arriving is None else _bytes(live)
    choice = _chosen(model, config, max_length, weights + converted)
    if not converted or next(model.parameters()).device.type != "cuda" or choice.staging == "device":
        return choice
    # Without a second copy there would be no weights to convert.
    return msgspec.structs.replace(choice, staging="host", device_bytes=converted)


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _chosen(model: Any, config: EngineConfig, max_length: int, weights: int) -> StagingChoice:
    device: torch.device = next(model.parameters()).device
    if config.staging != "auto" or device.type != "cuda":
        return chosen_staging(config.staging, weights, on_gpu=device.type == "cuda")
    # Imported here, because Triton is needed only with a GPU, and may be installed only there.
    from headrace.engines.embedded.device.state import bytes_of_block, free_bytes, layer_shapes

    room, cache = free_bytes(device, config.memory_fraction), 0
    if config.cache_tokens or 2 * weights > room:
        # Otherwise the size of the cache decides nothing, and the model need not run to tell it.
        prepare_experts(model)
        stored = cache_dtype(config, next(model.parameters()).dtype)
        block = bytes_of_block(layer_shapes(model), config.block_size, stored.itemsize)
        cache = wanted_blocks(config, max_length) * block
    return chosen_staging(config.staging, weights, on_gpu=True, room=room, cache=cache, exact=bool(config.cache_tokens))
