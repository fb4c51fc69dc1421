"""The GPU memory of a vLLM server: the share that it may take, and the size of its KV cache beside a trainer.

vLLM measures the memory that is free when it starts, and gives the rest of its share to the KV cache. Beside a trainer
that starts at the same time, such a measurement would be wrong, and vLLM ends if memory is freed meanwhile. So the size
of the cache is then computed here and passed to vLLM, which measures nothing.
"""

import msgspec

from headrace.config.declared import transport_facts
from headrace.config.hub import model_dir
from headrace.config.memory import BYTES, EVERY_ENGINE, longest_sequence, share_beside_trainer
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.schema import Config
from headrace.errors import UserError

VLLM_SHARE = 0.92
"""The share of a GPU that vLLM takes by default."""
WORKSPACE_BYTES = 3 << 30
"""What a server needs beside weights and cache: its CUDA context, captured graphs, activations and workspaces."""
LOGIT_BYTES = 16
"""Bytes per logit of a step: the logit, its copies while it is sampled from, and its log-probability."""


class Budget(msgspec.Struct, frozen=True):
    """The memory of one server on each of its GPUs."""

    share: float
    """The share of the GPU's memory for `--gpu-memory-utilization`."""
    cache_bytes: int = 0
    """The size of the KV cache, for `--kv-cache-memory-bytes`. 0: vLLM measures what is left of its share."""


def budget(config: Config, total: int, neighbours: tuple[str, ...] = ()) -> Budget | None:
    """Return the budget of a server on GPUs of `total` bytes; None if nothing is known of the GPU.

    `neighbours` are the workers that share its GPU. Raises `UserError` if they do not fit together.
    """
    engine = config.engine
    if not total:
        return None if engine.memory_fraction is None else Budget(engine.memory_fraction)
    facts = model_facts(model_dir(config.model), config.model.weights)
    weights = facts.parameters * BYTES[config.model.dtype] // engine.gpus_per_engine
    beside_trainer = any(name.startswith("trainer") for name in neighbours)
    servers = 1 + sum(name.startswith("engine") for name in neighbours)
    if beside_trainer:
        share = share_beside_trainer(config, total, servers)
    else:
        share = engine.memory_fraction or (EVERY_ENGINE / servers if servers > 1 else VLLM_SHARE)
    # What vLLM does not count: a version that is staged on the GPU beside the live weights.
    share -= _staged_bytes(config, weights, beside_trainer) / total
    left = round(share * total) - weights - _workspace(config, facts)
    if left <= 0:
        raise UserError(
            f"[engine] memory_fraction: a vLLM server gets {share * total / 2**30:.1f} GiB of a GPU of "
            f"{total / 2**30:.0f} GiB beside {', '.join(neighbours) or 'nothing else'}, and its weights and workspaces "
            f"alone need {(weights + _workspace(config, facts)) / 2**30:.1f} GiB"
        )
    if not beside_trainer:
        return Budget(share)
    cache = min(left, most_cache_bytes(config, facts))
    return Budget(share - (left - cache) / total, cache)


def most_cache_bytes(config: Config, facts: ModelFacts) -> int:
    """Return the bytes of the KV cache that the configured tokens need, or else `slots` sequences of full length."""
    engine = config.engine
    longest = longest_sequence(engine.max_length, facts.max_positions)
    # One more block for each sequence, because a sequence rarely ends at the end of a block.
    tokens = (engine.cache_tokens or engine.slots * longest) + engine.block_size * (engine.slots + 1)
    return tokens * facts.kv_bytes_per_token * BYTES[config.model.dtype] // 4


def _staged_bytes(config: Config, weights: int, beside_trainer: bool) -> int:
    """Return the bytes of a staged version on the server's GPU.

    Weights that a trainer on the same GPU publishes there are loaded from where they are, and so are the slices of
    several workers.
    """
    transport = config.delivery.transport
    in_place = beside_trainer and (transport == "auto" or transport_facts(transport).on_device)
    return 0 if in_place or config.engine.gpus_per_engine > 1 or config.lora is not None else weights


def _workspace(config: Config, facts: ModelFacts) -> int:
    return WORKSPACE_BYTES + config.engine.slots * facts.vocabulary * LOGIT_BYTES
