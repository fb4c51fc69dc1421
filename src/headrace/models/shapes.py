"""Named shapes: models that are measured without weights. The same name, dtype, device and seed give the same model.

Parameters are created on the device in the given dtype. Rotary frequencies stay in float32, as in a loaded model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.configuration_utils import PretrainedConfig

from headrace.errors import ModelError
from headrace.models.attention import ATTENTION

_COMMON: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_SMOLLM2_135M = _COMMON | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
}
_QWEN3 = _COMMON | {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_MOE_SMALL = _QWEN3 | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int) -> Callable[[], PretrainedConfig]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return partial(Qwen3Config, **_QWEN3 | sizes, num_hidden_layers=layers, num_attention_heads=heads)


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "smollm2-135m": partial(LlamaConfig, **_SMOLLM2_135M),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-moe-small": partial(Qwen3MoeConfig, **_QWEN3_MOE_SMALL),
}
"""The configuration of every shape, by name."""


def build_shape(name: str, dtype: str, device: str, seed: int) -> Any:
    """Build a random model of this shape on the device, in eval mode, with Headrace's attention."""
    if name not in SHAPES:
        raise ModelError(f"there is no shape {name!r}: one of {', '.join(SHAPES)}")
    devices = [torch.cuda.current_device()] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            SHAPES[name](), dtype=getattr(torch, dtype), attn_implementation=ATTENTION
        )
    for buffer_name, buffer in model.named_buffers():
        # Rounded frequencies would be wrong by whole radians at long positions, and nothing else would show that.
        if buffer_name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ModelError(f"shape {name}: {buffer_name} was made as {buffer.dtype}, not in float32")
    return model.eval()
