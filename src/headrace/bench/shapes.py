"""Named shapes: the configurations of published models, which are measured without their weights.

No shape has an end token, so every answer has its full length.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.configuration_utils import PretrainedConfig

_ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_COMMON = _ENDLESS | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
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
_LLAMA_3_1_8B = _ENDLESS | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN3 = _COMMON | {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
_QWEN3_MOE = _QWEN3 | {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_QWEN3_MOE_SMALL = _QWEN3_MOE | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_experts": 64,
}
_QWEN3_30B_A3B = _QWEN3_MOE | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_experts": 128,
}
# Its other values are those of GptOssConfig: heads, windows of every second layer, rotary scaling, the clamp.
_GPT_OSS_20B = _ENDLESS | {"num_hidden_layers": 24, "num_local_experts": 32, "num_experts_per_tok": 4}


def _qwen3(hidden: int, intermediate: int, layers: int, heads: int, **changes: Any) -> Callable[[], PretrainedConfig]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, **changes}
    return partial(Qwen3Config, **_QWEN3 | sizes, num_hidden_layers=layers, num_attention_heads=heads)


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "smollm2-135m": partial(LlamaConfig, **_SMOLLM2_135M),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tie_word_embeddings=False),
    "llama-3.1-8b": partial(LlamaConfig, **_LLAMA_3_1_8B),
    "qwen3-moe-small": partial(Qwen3MoeConfig, **_QWEN3_MOE_SMALL),
    "qwen3-30b-a3b": partial(Qwen3MoeConfig, **_QWEN3_30B_A3B),
    "gpt-oss-20b": partial(GptOssConfig, **_GPT_OSS_20B),
}
"""The configuration of every shape, by name. `qwen3-moe-small` is no published model."""
