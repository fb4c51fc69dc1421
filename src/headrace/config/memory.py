"""How one GPU's memory is divided between a trainer and an engine: the trainer's need is estimated, the rest is left.

Of trained weights: masters, gradients and two moments in float32, a 16-bit copy, and two places to publish in. Of a
pass: what its layers keep for the backward pass, and the logits of one chunk. A margin is for what nobody counts.
"""

from __future__ import annotations

from headrace.config.model_dir import ModelFacts
from headrace.config.schema import Config, LoraConfig, TrainingConfig

STATE_BYTES = {"adamw": 16, "adamw_8bit": 10, "muon": 12}
"""Of a trained parameter: master, gradient, moments."""
KEPT_VALUES = 34
"""Numbers that a layer keeps of a token for the backward pass, in units of the hidden size."""
CHUNK_BYTES = 3 << 30
"""Logits of one chunk in float32, their gradient, and the gradient of the head."""
MARGIN_BYTES = 4 << 30
"""The two processes' CUDA contexts, fragments, library workspaces."""


def trainer_bytes(
    training: TrainingConfig, facts: ModelFacts, *, served_bytes: int = 2, lora: LoraConfig | None = None
) -> int:
    """What a trainer on a GPU needs at most, roughly."""
    copy = 4 if training.compute_dtype == "float32" else 2
    trained = 0 if lora else facts.parameters
    # In 4 bits and the scales of their blocks, what is not linear in full: together about a byte. Experts are in full.
    frozen = 1 if lora and lora.base == "nf4" and not facts.experts else copy
    state = (
        trained * (STATE_BYTES[training.optimizer] + copy + 2 * served_bytes) + (facts.parameters - trained) * frozen
    )
    kept = 2 if training.activation_checkpointing else KEPT_VALUES
    row = training.micro_batch_tokens * facts.hidden * (copy * kept * facts.layers)
    return state + row + CHUNK_BYTES


def engine_share(config: Config, facts: ModelFacts, total: int) -> float:
    """The share of a GPU of `total` bytes that is left to each engine beside the trainer; not above 0 where none is."""
    served = 4 if (config.delivery.dtype or config.model.dtype) == "float32" else 2
    needed = trainer_bytes(config.training, facts, served_bytes=served, lora=config.lora)
    return (total - needed - MARGIN_BYTES) / total / config.engine.count
