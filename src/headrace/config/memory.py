"""How one GPU's memory is divided between a trainer and an engine: the trainer's need is estimated, the rest is left.

The need is that of one trainer process, so of one GPU where `[training] ranks` share the model, by what it is for: see
`TrainerMemory`. It is meant as the most that there can be. A margin is for what nobody counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from headrace.config.declared import needs, transport_facts
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.schema import Config, LoraConfig, TrainingConfig

STATE_BYTES = {"adamw": 16, "adamw_8bit": 10, "muon": 12}
"""Of a trained parameter: master, gradient, moments."""
FOUR_BITS = 9 / 16
"""Bytes of a weight in 4 bits, with its share of the scale of a block."""
KEPT_VALUES = 34
"""Numbers that a layer keeps of a token for the backward pass, in units of the hidden size."""
CHECKPOINTED_VALUES = 2
"""The same of a layer that is computed again."""
CHUNK_LOGITS = 1 << 28
"""Logits that a GPU holds at once; a CPU holds a quarter."""
PLAIN_LOGIT_BYTES = 16
"""Of one logit, where what is done to it is not compiled: itself and what is made of it, in float32."""
MARGIN_BYTES = 4 << 30
"""The two processes' CUDA contexts, fragments, library workspaces."""
LONGEST_DEFAULT = 4096
"""Tokens of a sequence, where neither the engine nor the model says."""


class TrainerMemory(NamedTuple):
    """What one process of a trainer needs on its device, in bytes, by what for."""

    state: int
    """The weights, and of those that are trained masters, gradients and moments; nothing where they are offloaded."""
    publishing: int
    """Two places to publish in, where weights travel by the GPU's memory."""
    policies: int
    """Copies of the trained weights: the reference, and a proximal policy that is recomputed."""
    teacher: int
    gathered: int
    """Sharded or offloaded: weights that a pass brings together, and gradients that are not yet divided."""
    computing: int
    """What the layers of a pass keep, and the vocabulary projection; or the gradients that they leave, if more."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def trainer_memory(
    config: Config, facts: ModelFacts, teacher: ModelFacts | None = None, *, on_gpu: bool = True
) -> TrainerMemory:
    """What a trainer process needs at most, roughly. `facts` are the model's, `teacher` those of `teacher_facts`."""
    training, trained = config.training, trained_parameters(config.lora, facts)
    copy = _copy_bytes(training, on_gpu)
    sharded = _is_sharded(training)
    held = 0 if training.offload else 1
    return TrainerMemory(
        state=held * state_bytes(config, facts, on_gpu=on_gpu),
        publishing=_part(2 * _published_bytes(config) * trained, training) if _publishes_on(config, on_gpu) else 0,
        policies=held * _part(_copies(config) * trained * (4 if sharded else copy), training),
        teacher=held * (teacher.parameters if teacher is not None else 0) * (2 if on_gpu else 4),
        gathered=_gathered(config, facts, copy) if sharded else 0,
        computing=max(
            _kept(training, facts, copy) + _head(config, facts, copy, on_gpu=on_gpu),
            # Those of a narrower copy are moved to the masters once a pass is over.
            0 if sharded or copy == 4 else trained * copy,
        ),
    )


def teacher_facts(config: Config) -> ModelFacts | None:
    """Figures of `[algorithm] teacher`, if there is one."""
    teacher = config.algorithm.teacher
    return model_facts(Path(teacher), "load") if teacher is not None else None


def engine_share(config: Config, facts: ModelFacts, total: int, teacher: ModelFacts | None = None) -> float:
    """The share of a GPU of `total` bytes that is left to each engine beside the trainer; not above 0 where none is."""
    needed = trainer_memory(config, facts, teacher).total
    return (total - needed - MARGIN_BYTES) / total / config.engine.count


def excess_bytes(
    config: Config, facts: ModelFacts, total: int, fraction: float, teacher: ModelFacts | None = None
) -> int:
    """By how much a trainer and engines of this share each exceed a GPU of `total` bytes; not above 0 if they fit.

    No margin is counted: who gives a share has decided how much there is to be.
    """
    return trainer_memory(config, facts, teacher).total + round(fraction * total) * config.engine.count - total


def state_bytes(config: Config, facts: ModelFacts, *, on_gpu: bool = True) -> int:
    """The weights of one process and all that the optimizer has for them, on the device or in the host's memory."""
    training, trained = config.training, trained_parameters(config.lora, facts)
    copy = _copy_bytes(training, on_gpu)
    if _is_sharded(training):
        frozen = 4 * facts.parameters if config.lora else 0
        return _part(trained * STATE_BYTES[training.optimizer] + frozen, training)
    own = trained * (STATE_BYTES[training.optimizer] + (copy if copy < 4 else 0))
    return own + (_frozen_bytes(config.lora, facts, copy) if config.lora else 0)


def trained_parameters(lora: LoraConfig | None, facts: ModelFacts) -> int:
    """All, or an adapter's: rank x (inputs + outputs) of a matrix, both taken for as wide as the model."""
    if lora is None:
        return facts.parameters
    full = sum(name.endswith(("lm_head", "embed_tokens")) for name in lora.modules)
    adapted = 2 * lora.rank * (facts.parameters - _outer(facts)) // max(1, facts.hidden)
    return adapted + full * facts.vocabulary * facts.hidden


def _is_sharded(training: TrainingConfig) -> bool:
    return training.ranks > 1 or training.offload


def _part(size: int, training: TrainingConfig) -> int:
    """What a rank has of it."""
    return -(-size // training.ranks)


def _copy_bytes(training: TrainingConfig, on_gpu: bool) -> int:
    """Of a number in the passes."""
    return 4 if (training.compute_dtype or ("bfloat16" if on_gpu else "float32")) == "float32" else 2


def _published_bytes(config: Config) -> int:
    if config.lora is not None and config.lora.serve == "merged":
        return 4
    return 4 if (config.delivery.dtype or config.model.dtype) == "float32" else 2


def _publishes_on(config: Config, on_gpu: bool) -> bool:
    """Whether what is published lies in the trainer's device memory; other transports take the host's."""
    transport = config.delivery.transport
    return on_gpu and (transport == "auto" or transport_facts(transport).on_device)


def _copies(config: Config) -> int:
    """Whole copies of what is trained; an adapter that is switched off leaves the reference."""
    asked = needs(config.algorithm)
    return (asked.reference and config.lora is None) + asked.proximal


def _outer(facts: ModelFacts) -> int:
    """Parameters of embeddings and vocabulary projection, as if they were two matrices."""
    return min(facts.parameters, 2 * facts.vocabulary * facts.hidden)


def _frozen_bytes(lora: LoraConfig, facts: ModelFacts, copy: int) -> int:
    """The base model: in 4 bits all but embeddings and projection, but for experts, which are held in full."""
    if lora.base != "nf4" or facts.experts:
        return facts.parameters * copy
    outer = _outer(facts)
    return outer * copy + round((facts.parameters - outer) * FOUR_BITS)


def _gathered(config: Config, facts: ModelFacts, copy: int) -> int:
    """Embeddings and projection, the layer in use and the next one; gradients of all weights between two passes."""
    outer, layers = _outer(facts), max(1, facts.layers)
    layer = (facts.parameters - outer) // layers
    trained = trained_parameters(config.lora, facts)
    gradients = trained if _takes_several_passes(config, facts) else min(trained, outer + layer)
    return copy * (outer + min(2, layers) * layer) + 4 * gradients


def _takes_several_passes(config: Config, facts: ModelFacts) -> bool:
    """Whether a batch of the longest sequences is more than one pass of each rank."""
    training = config.training
    longest = min(config.engine.max_length or LONGEST_DEFAULT, facts.max_positions or LONGEST_DEFAULT)
    warm = config.warm_start.batch if config.warm_start.steps else 0
    sequences = max(config.buffer.groups * config.rollouts.group_size, warm)
    return sequences * longest > training.micro_batch_tokens * (training.ranks // training.tensor_parallel)


def _kept(training: TrainingConfig, facts: ModelFacts, copy: int) -> int:
    """What the layers keep of a pass; of layers that are computed again, one is whole at a time."""
    values = KEPT_VALUES * facts.layers
    if training.activation_checkpointing:
        values = min(values, CHECKPOINTED_VALUES * facts.layers + KEPT_VALUES)
    return training.micro_batch_tokens * facts.hidden * copy * values


def _head(config: Config, facts: ModelFacts, copy: int, *, on_gpu: bool) -> int:
    """A chunk of logits and their gradient; that of the projection, twice in float32 to be added, and as it is left."""
    training = config.training
    most = CHUNK_LOGITS if on_gpu else CHUNK_LOGITS // 4
    logits = min(most, training.micro_batch_tokens * facts.vocabulary)
    a_logit = 4 + copy if on_gpu and training.compile else PLAIN_LOGIT_BYTES
    is_trained = config.lora is None or any(name.endswith("lm_head") for name in config.lora.modules)
    return logits * a_logit + is_trained * (8 + copy) * facts.vocabulary * facts.hidden
