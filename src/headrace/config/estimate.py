"""A rough estimate of memory and of the slower side, from the configuration and the model's figures alone.

The formulas are the usual ones: training costs six floating-point operations a parameter and token, generation two but
bounded by reading the weights once a step. They say which side will wait, not how long it will take.
"""

from __future__ import annotations

from typing import Any

from headrace.config.model_dir import ModelFacts
from headrace.config.schema import Config

BYTES = {"float32": 4, "bfloat16": 2}
CORE_FLOPS = 25e9
"""Of one CPU core in float32 matrix products."""
CORE_BANDWIDTH = 8e9
STEP_OVERHEAD = 60e-6
"""Seconds a layer and forward pass, whatever its size."""
PROMPT_TOKENS = 64
"""Assumed, where nothing is known."""
FRACTION_OF_MAX = 0.5
"""Assumed mean answer length, of `max_tokens`."""


def estimate(config: Config, facts: ModelFacts) -> dict[str, Any]:
    """Memory in bytes by process, seconds a version on each side, and which is larger."""
    rollouts, engine = config.rollouts, config.engine
    answers = config.buffer.groups * rollouts.group_size * config.delivery.publish_every
    tokens = max(1.0, rollouts.max_tokens * FRACTION_OF_MAX)
    generation = _generation(config, facts, answers, tokens) / engine.processes
    prompts = PROMPT_TOKENS / (rollouts.group_size if config.training.share_prefixes else 1)
    training = _training(config, facts, answers * (tokens + prompts))
    # The weights; unless only an adapter has them, their gradients and their moments too.
    trained = 16 if config.lora is None else 1 if config.lora.base == "nf4" and not facts.experts else 4
    served = facts.parameters * BYTES[config.model.dtype]
    longest = min(engine.max_length or 4096, facts.max_positions or 4096)
    cache = engine.cache_tokens or engine.slots * min(longest, PROMPT_TOKENS + rollouts.max_tokens)
    return {
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "memory_bytes": {
            "trainer": facts.parameters * trained + config.training.micro_batch_tokens * facts.vocabulary * 8,
            "engine": 2 * served + cache * facts.kv_bytes_per_token * BYTES[config.model.dtype] // 4,
            "shared": 2 * served,
        },
        "generation_seconds": generation,
        "training_seconds": training,
        "bottleneck": "generation" if generation > training else "training",
    }


def _generation(config: Config, facts: ModelFacts, answers: int, tokens: float) -> float:
    threads = config.engine.threads
    rows = min(config.engine.slots, answers)
    compute = 2 * facts.parameters * rows / (CORE_FLOPS * threads)
    reading = facts.parameters * 4 / (CORE_BANDWIDTH * threads)
    return max(compute, reading, facts.layers * STEP_OVERHEAD) * tokens * answers / rows


def _training(config: Config, facts: ModelFacts, tokens: float) -> float:
    passes = max(1.0, tokens / config.training.micro_batch_tokens)
    compute = 6 * facts.parameters * tokens / (CORE_FLOPS * config.training.threads)
    optimizer = facts.parameters * 40 / CORE_BANDWIDTH
    return compute + optimizer + 3 * passes * facts.layers * STEP_OVERHEAD
