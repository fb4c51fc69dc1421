"""A rough estimate of memory and of the slower side, from the configuration and the model's figures alone.

The formulas are the usual ones. Training takes six floating-point operations per parameter and token. Generation takes
two, but each step must also read all weights once. The estimate says which side will wait, not how long it will take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.config.memory import LONGEST_DEFAULT, state_bytes, teacher_facts, trainer_memory
from headrace.config.model_dir import ModelFacts
from headrace.config.schema import Config, TrainingConfig

BYTES = {"float32": 4, "bfloat16": 2}
GPU_DRIVER = Path("/dev/nvidiactl")
"""This path exists where a GPU can be used. Checking the path needs no torch."""
CORE_FLOPS = 25e9
"""Floating-point operations per second of one CPU core in float32 matrix products."""
CORE_BANDWIDTH = 8e9
STEP_OVERHEAD = 60e-6
"""Seconds for each layer of a forward pass, whatever its size."""
PROMPT_TOKENS = 64
"""The assumed prompt length, since nothing is known about prompts here."""
FRACTION_OF_MAX = 0.5
"""The assumed mean answer length, as a fraction of `max_tokens`."""


def estimate(config: Config, facts: ModelFacts) -> dict[str, Any]:
    """Estimate the memory of each process in bytes, the seconds per version on each side, and the slower side.

    Each trainer rank is a process. What a rank offloads is counted as host memory.
    """
    rollouts, engine = config.rollouts, config.engine
    answers = config.buffer.groups * rollouts.group_size * config.delivery.publish_every
    tokens = max(1.0, rollouts.max_tokens * FRACTION_OF_MAX)
    generation = _generation(config, facts, answers, tokens) / engine.processes
    prompts = PROMPT_TOKENS / (rollouts.group_size if config.training.share_prefixes else 1)
    training = _training(config, facts, answers * (tokens + prompts))
    on_gpu = _trains_on_gpu(config.training)
    served = facts.parameters * BYTES[config.model.dtype]
    longest = min(engine.max_length or LONGEST_DEFAULT, facts.max_positions or LONGEST_DEFAULT)
    cache = engine.cache_tokens or engine.slots * min(longest, PROMPT_TOKENS + rollouts.max_tokens)
    return {
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "memory_bytes": {
            "trainer": trainer_memory(config, facts, teacher_facts(config), on_gpu=on_gpu).total,
            "offloaded": state_bytes(config, facts, on_gpu=on_gpu) if config.training.offload else 0,
            "engine": 2 * served + cache * facts.kv_bytes_per_token * BYTES[config.model.dtype] // 4,
            "shared": 2 * served,
        },
        "trainer_ranks": config.training.ranks,
        "generation_seconds": generation,
        "training_seconds": training,
        "bottleneck": "generation" if generation > training else "training",
    }


def _trains_on_gpu(training: TrainingConfig) -> bool:
    return training.device == "cuda" or (training.device == "auto" and GPU_DRIVER.exists())


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
