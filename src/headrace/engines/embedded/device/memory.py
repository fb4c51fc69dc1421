"""The KV cache on the device: tensors at fixed addresses, one pair per layer, sized from the free memory.

The cache may take the memory that is free after the model is loaded, minus a second copy of the weights, which a
delivery stages beside the live ones, and minus a margin for activations and captured graphs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from headrace.errors import UserError
from headrace.models.attention import AttentionCall, attending

LayerShape = tuple[int, int, int]
"""The number of key/value heads, the size of a key, the size of a value."""
MARGIN = 0.10
"""The share of the device's memory that the cache leaves to activations and graphs."""


class DeviceCache:
    """The keys and values of each layer, `[blocks, heads, block_size, head size]`.

    The part of a block that belongs to one head is one piece of memory.
    """

    def __init__(
        self, shapes: Seq[LayerShape], blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.layers = [
            (
                torch.zeros((blocks, heads, block_size, key), dtype=dtype, device=device),
                torch.zeros((blocks, heads, block_size, value), dtype=dtype, device=device),
            )
            for heads, key, value in shapes
        ]

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks in all layers. Every source is read before any target is written."""
        for stores in self.layers:
            for store in stores:
                store.index_copy_(0, targets.long(), store.index_select(0, sources))


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of what each layer stores for a token, found by a pass through the model."""
    probe = _Probe()
    with torch.inference_mode(), attending(probe):
        # Made in inference mode, as in every pass. Otherwise the layers would be compiled again.
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1)
    return [probe.shapes[layer] for layer in sorted(probe.shapes)]


def affordable_blocks(model: Any, shapes: Seq[LayerShape], block_size: int, fraction: float | None) -> int:
    """Return how many blocks the model's device has room for beside a second copy of the weights and the margin.

    With `fraction`, the cache and everything else in this process stay within that share of the device's memory. Raises
    `UserError` if there is no room for one block.
    """
    parameter = next(model.parameters())
    device = parameter.device
    weight_bytes: int = sum(p.nbytes for p in model.parameters())
    per_token = sum(heads * (key + value) for heads, key, value in shapes)
    block_bytes: int = block_size * per_token * parameter.element_size()
    free, total = torch.cuda.mem_get_info(device)
    if fraction is not None:
        free = min(free, int(fraction * total) - torch.cuda.memory_reserved(device))
    room = free - weight_bytes - int(MARGIN * total * (fraction or 1.0))
    if room < block_bytes:
        raise UserError(
            f"no memory is left for a KV cache on {torch.cuda.get_device_name(device)}: {free / 2**30:.1f} GiB are"
            f" free, and a second copy of the weights and a margin need {(free - room) / 2**30:.1f} GiB"
        )
    return room // block_bytes


class _Probe:
    """An attention context that returns zeros and records the shapes of what each layer would store."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.shapes[call.layer] = (call.key.shape[1], call.key.shape[3], call.value.shape[3])
        _, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(1, tokens, heads, call.value.shape[3])
