"""The choice of where an embedded engine stages new weights, from the memory that its device has left."""

from typing import Any

import torch

from headrace.config.schema import EngineConfig
from headrace.config.staging import StagingChoice, chosen_staging
from headrace.engines.embedded.setup import wanted_blocks


def choose_staging(model: Any, config: EngineConfig, max_length: int, weights: int) -> StagingChoice:
    """Choose where this engine stages versions of `weights` bytes. Call this before the layers are compiled."""
    device: torch.device = next(model.parameters()).device
    if config.staging != "auto" or device.type != "cuda":
        return chosen_staging(config.staging, weights, on_gpu=device.type == "cuda")
    # Imported here, because Triton is needed only with a GPU, and may be installed only there.
    from headrace.engines.embedded.device.state import bytes_of_block, free_bytes, layer_shapes

    block = bytes_of_block(layer_shapes(model), config.block_size, next(model.parameters()).element_size())
    return chosen_staging(
        config.staging,
        weights,
        on_gpu=True,
        room=free_bytes(device, config.memory_fraction),
        cache=wanted_blocks(config, max_length) * block,
        exact=bool(config.cache_tokens),
    )
