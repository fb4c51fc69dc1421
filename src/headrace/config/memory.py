"""Estimates from the configuration and the model's figures alone: memory, and which side of a run is slower.

Where a trainer and engines share one GPU, the trainer's need is estimated, and the engines get the rest.
`TrainerMemory` lists the need of one trainer process by purpose. With several `[training] ranks` this is the need on
one GPU. The estimate is meant as an upper bound. A margin covers what is not counted.

The formulas for time are the usual ones. Training takes six floating-point operations per parameter and token.
Generation takes two, but each step must also read all weights once. The estimate says which side will wait, not how
long it will take.
"""

from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.declared import needs, transport_facts
from headrace.config.hub import model_dir, teacher_dir
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.schema import Config, LoraConfig, TrainingConfig
from headrace.config.staging import with_second_copy
from headrace.errors import UserError

STATE_BYTES = {"adamw": 16, "adamw_8bit": 10, "muon": 12}
"""Bytes of a trained parameter: its master copy, gradient and moments."""
FOUR_BITS = 9 / 16
"""Bytes of a weight in 4 bits, including its share of the block's scale."""
KEPT_VALUES = 34
"""How many numbers a layer keeps per token for the backward pass, in units of the hidden size."""
CHECKPOINTED_VALUES = 2
"""Like `KEPT_VALUES`, for a layer whose activations are computed again."""
CHUNK_LOGITS = 1 << 28
"""How many logits a GPU holds at once. A CPU holds a quarter of that."""
PLAIN_LOGIT_BYTES = 16
"""Bytes per logit where the operations on logits are not compiled: the logit and the intermediate values in float32."""
MARGIN_BYTES = 4 << 30
"""The memory for the two processes' CUDA contexts, fragmentation and library workspaces."""
LONGEST_DEFAULT = 4096
"""The longest sequence in tokens, if neither the engine nor the model gives a limit."""
BYTES = {"float32": 4, "bfloat16": 2}
GPU_DRIVER = Path("/dev/nvidiactl")
"""This path exists where a GPU can be used. Checking the path needs no torch."""
EVERY_ENGINE = 0.9
"""The share of a GPU's memory that the engines on it take together, if there are several and no trainer."""
_SMALLER_TRAINER = "lower [training] micro_batch_tokens, set activation_checkpointing or offload, or take more ranks"
CORE_FLOPS = 25e9
"""Floating-point operations per second of one CPU core in float32 matrix products."""
CORE_BANDWIDTH = 8e9
STEP_OVERHEAD = 60e-6
"""Seconds for each layer of a forward pass, whatever its size."""
PROMPT_TOKENS = 64
"""The assumed prompt length, since nothing is known about prompts here."""
FRACTION_OF_MAX = 0.5
"""The assumed mean answer length, as a fraction of `max_tokens`."""


class TrainerMemory(NamedTuple):
    """The bytes that one trainer process needs on its device, by purpose."""

    state: int
    """All weights, plus the masters, gradients and moments of trained weights. 0 where they are offloaded."""
    publishing: int
    """Two buffers for published weights, if weights travel through GPU memory."""
    policies: int
    """Copies of the trained weights: the reference policy, a recomputed proximal policy, and teachers that follow the
    policy."""
    teacher: int
    gathered: int
    """If sharded or offloaded: the weights that a pass gathers, and gradients that are not yet distributed."""
    computing: int
    """What layers and vocabulary projection keep during a pass, or the gradients after a pass if they are larger."""

    @property
    def total(self) -> int:
        """The sum over all purposes."""
        return sum(self)


def trainer_memory(
    config: Config, facts: ModelFacts, teacher: ModelFacts | None = None, *, on_gpu: bool = True
) -> TrainerMemory:
    """Estimate the most memory that a trainer process needs. `facts` are the model's, `teacher` the teacher's."""
    training, trained = config.training, trained_parameters(config.lora, facts)
    copy = _copy_bytes(training, on_gpu)
    sharded = training.processes > 1 or training.offload
    held = 0 if training.offload else 1
    merged = config.lora is not None and config.lora.serve == "merged"
    sent = 4 if merged or (config.delivery.dtype or config.model.dtype) == "float32" else 2
    transport = config.delivery.transport
    # Other transports keep published weights in host memory.
    published = on_gpu and (transport == "auto" or transport_facts(transport).on_device)
    asked = needs(config.algorithm)
    # With an adapter the reference needs no copy: it is the model with the adapter switched off.
    copies = (asked.reference and config.lora is None) + asked.proximal
    # Teachers that follow the policy are copies of the master weights.
    following = sum(1 if one.policy == "ema" else one.versions_ago + 1 for one in config.moving_teachers.values())
    # Weights in 4 bits are whole on every rank, and stay on the device where others are offloaded.
    rounded = round(_four_bit_weights(config.lora, facts) * FOUR_BITS) if sharded else 0
    return TrainerMemory(
        state=held * state_bytes(config, facts, on_gpu=on_gpu) + rounded,
        publishing=_part(2 * sent * trained, training) if published else 0,
        policies=held * _part((copies * (4 if sharded else copy) + following * 4) * trained, training),
        teacher=held * (teacher.parameters if teacher is not None else 0) * (2 if on_gpu else 4),
        gathered=_gathered(config, facts, copy) if sharded else 0,
        computing=max(
            _kept(training, facts, copy) + _head(config, facts, copy, on_gpu=on_gpu),
            # After a pass, the gradients of a copy in a narrower dtype are moved to the masters.
            0 if sharded or copy == 4 else trained * copy,
        ),
    )


def longest_sequence(configured: int, positions: int) -> int:
    """Return the length of the longest sequence that an engine takes. A limit that is not given is 0."""
    return min(configured or LONGEST_DEFAULT, positions or LONGEST_DEFAULT)


def teacher_facts(config: Config) -> ModelFacts | None:
    """Return the figures of the model that `[algorithm] teacher` names, if there is one."""
    teacher = teacher_dir(config)
    return model_facts(teacher, "load") if teacher is not None else None


def engine_share(
    config: Config, facts: ModelFacts, total: int, teacher: ModelFacts | None = None, *, engines: int = 1
) -> float:
    """Return the share of a GPU of `total` bytes that is left to each of these engines beside the trainer.

    The share is 0 or less if nothing is left.
    """
    needed = trainer_memory(config, facts, teacher).total
    return (total - needed - MARGIN_BYTES) / total / engines


def share_beside_trainer(config: Config, total: int, count: int = 1) -> float:
    """Return the share of a GPU of `total` bytes that each of `count` engines may take beside the trainer.

    The share is `[engine] memory_fraction`, or else what the trainer is estimated to leave. Raises `UserError` if
    trainer and engines do not fit together.
    """
    facts, teacher = model_facts(model_dir(config.model), config.model.weights), teacher_facts(config)
    needed = trainer_memory(config, facts, teacher).total
    given = config.engine.memory_fraction
    if given is None:
        share = engine_share(config, facts, total, teacher, engines=count)
        if share <= 0:
            raise UserError(
                f"trainer and engine do not fit on one GPU of {total / 2**30:.0f} GiB: the trainer is estimated to need"
                f" {needed / 2**30:.1f} GiB, and {MARGIN_BYTES / 2**30:.0f} GiB are a margin ({_SMALLER_TRAINER})"
            )
        return share
    # No margin is counted, because a user who sets the fraction has decided on the margin.
    if needed + round(given * total) * count > total:
        raise UserError(
            f"[engine] memory_fraction = {given:g}: {f'{count} engines take' if count > 1 else 'the engine takes'}"
            f" {given * count * total / 2**30:.1f} GiB of a GPU of {total / 2**30:.0f} GiB, and the trainer is"
            f" estimated to need {needed / 2**30:.1f} GiB (lower it, or {_SMALLER_TRAINER})"
        )
    return given


def state_bytes(config: Config, facts: ModelFacts, *, on_gpu: bool = True) -> int:
    """Return the bytes of one process's weights and optimizer state, on the device or in host memory.

    If they are sharded, weights in 4 bits are not counted.
    """
    training, trained = config.training, trained_parameters(config.lora, facts)
    copy = _copy_bytes(training, on_gpu)
    if training.processes > 1 or training.offload:
        frozen = 4 * (facts.parameters - _four_bit_weights(config.lora, facts)) if config.lora else 0
        return _part(trained * STATE_BYTES[training.optimizer] + frozen, training)
    own = trained * (STATE_BYTES[training.optimizer] + (copy if copy < 4 else 0))
    return own + (_frozen_bytes(config.lora, facts, copy) if config.lora else 0)


def trained_parameters(lora: LoraConfig | None, facts: ModelFacts) -> int:
    """Return the number of trained parameters: all of the model's, or an adapter's.

    An adapter has rank x (inputs + outputs) parameters for each matrix. Both sides are assumed as wide as the model.
    """
    if lora is None:
        return facts.parameters
    full = sum(name.endswith(("lm_head", "embed_tokens")) for name in lora.modules)
    adapted = 2 * lora.rank * (facts.parameters - _outer(facts)) // max(1, facts.hidden)
    return adapted + full * facts.vocabulary * facts.hidden


def _part(size: int, training: TrainingConfig) -> int:
    return -(-size // training.processes)


def _copy_bytes(training: TrainingConfig, on_gpu: bool) -> int:
    """Return the bytes of a number in the forward and backward passes."""
    return 4 if (training.compute_dtype or ("bfloat16" if on_gpu else "float32")) == "float32" else 2


def _outer(facts: ModelFacts) -> int:
    """Return the number of parameters of embeddings and vocabulary projection, counted as two separate matrices."""
    return min(facts.parameters, 2 * facts.vocabulary * facts.hidden)


def _frozen_bytes(lora: LoraConfig, facts: ModelFacts, copy: int) -> int:
    """Return the bytes of the frozen base. In 4 bits, embeddings, projection and a model with experts stay in full."""
    rounded = _four_bit_weights(lora, facts)
    return (facts.parameters - rounded) * copy + round(rounded * FOUR_BITS)


def _four_bit_weights(lora: LoraConfig | None, facts: ModelFacts) -> int:
    """Return the number of frozen weights that are held in 4 bits."""
    return facts.parameters - _outer(facts) if lora and lora.base == "nf4" and not facts.experts else 0


def _gathered(config: Config, facts: ModelFacts, copy: int) -> int:
    """Return the bytes that a sharded pass gathers, with its gradients.

    It gathers embeddings, projection, the layer in use and the next one. With several passes in a step, it also keeps
    the gradients of all weights between two passes.
    """
    outer, layers = _outer(facts), max(1, facts.layers)
    layer = (facts.parameters - outer) // layers
    trained, training = trained_parameters(config.lora, facts), config.training
    longest = longest_sequence(config.engine.max_length, facts.max_positions)
    warm = config.warm_start.batch if config.warm_start.steps else 0
    sequences = max(config.buffer.groups * config.rollouts.group_size, warm)
    row_tokens = training.micro_batch_tokens * (training.processes // training.tensor_parallel)
    gradients = trained if sequences * longest > row_tokens else min(trained, outer + layer)
    return copy * (outer + min(2, layers) * layer) + 4 * gradients


def _kept(training: TrainingConfig, facts: ModelFacts, copy: int) -> int:
    """Return the bytes that the layers keep in a pass. If checkpointed, only one layer holds all its activations."""
    values = KEPT_VALUES * facts.layers
    if training.activation_checkpointing:
        values = min(values, CHECKPOINTED_VALUES * facts.layers + KEPT_VALUES)
    return training.micro_batch_tokens * facts.hidden * copy * values


def _head(config: Config, facts: ModelFacts, copy: int, *, on_gpu: bool) -> int:
    """Return the bytes of the vocabulary projection in a pass.

    These are a chunk of logits with their gradient, and the gradient of the projection: twice in float32 while it is
    summed, and once in the dtype of the passes.
    """
    training = config.training
    most = CHUNK_LOGITS if on_gpu else CHUNK_LOGITS // 4
    logits = min(most, training.micro_batch_tokens * facts.vocabulary)
    a_logit = 4 + copy if on_gpu and training.compile else PLAIN_LOGIT_BYTES
    is_trained = config.lora is None or any(name.endswith("lm_head") for name in config.lora.modules)
    return logits * a_logit + is_trained * (8 + copy) * facts.vocabulary * facts.hidden


def runs_on_gpu(device: str) -> bool:
    """Return whether a process with this `device` key takes a GPU of this host."""
    return device == "cuda" or (device == "auto" and GPU_DRIVER.exists())


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
    on_gpu = runs_on_gpu(config.training.device)
    size = BYTES[config.model.dtype]
    served = facts.parameters * size
    # A shared base is counted with the trainer.
    own = 0 if config.lora is not None and config.lora.share_base else served_bytes(config, facts)
    longest = longest_sequence(engine.max_length, facts.max_positions)
    cache = engine.cache_tokens or engine.slots * min(longest, PROMPT_TOKENS + rollouts.max_tokens)
    return {
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "memory_bytes": {
            "trainer": trainer_memory(config, facts, teacher_facts(config), on_gpu=on_gpu).total,
            "offloaded": state_bytes(config, facts, on_gpu=on_gpu) if config.training.offload else 0,
            "engine": own + second_copy(config, facts) + _cache_bytes(config, facts, cache),
            "shared": 2 * served,
        },
        "trainer_ranks": config.training.processes,
        "generation_seconds": generation,
        "training_seconds": training,
        "bottleneck": "generation" if generation > training else "training",
    }


def least_engine_bytes(config: Config, facts: ModelFacts) -> int:
    """Return the least GPU memory of one engine: live and staged weights, and the cache of one longest answer.

    With `staging = "auto"` the least is without staged weights, except those that were rounded.
    """
    longest = longest_sequence(config.engine.max_length, facts.max_positions)
    tokens = config.engine.cache_tokens or min(longest, PROMPT_TOKENS + config.rollouts.max_tokens)
    fits_in_one = config.lora is None and with_second_copy(config).staging == "auto"
    second = _converted_copy(config, facts) if fits_in_one else second_copy(config, facts)
    return served_bytes(config, facts) + second + _cache_bytes(config, facts, tokens)


def _cache_bytes(config: Config, facts: ModelFacts, tokens: int) -> int:
    """Return the bytes of the keys and values of this many tokens. A CPU stores rounded ones in the model's dtype."""
    rounded = config.engine.kv_dtype == "fp8" and runs_on_gpu(config.engine.device)
    return tokens * facts.kv_bytes_per_token * (1 if rounded else BYTES[config.model.dtype]) // 4


def second_copy(config: Config, facts: ModelFacts) -> int:
    """Return the bytes of weights that an engine holds beside the live ones on its device.

    They are a staged version, unless `[engine] staging` says otherwise. A version that is rounded is also staged in
    that form, on the device. With a merged adapter they are the original weights, and with an unmerged one the staged
    adapter.
    """
    whole = facts.parameters * BYTES[config.model.dtype]
    if config.lora is not None and config.lora.serve == "merged":
        return whole
    if config.engine.staging in ("host", "none"):
        return _converted_copy(config, facts)
    return (
        whole + _converted_copy(config, facts)
        if config.lora is None
        else trained_parameters(config.lora, facts) * BYTES[config.model.dtype]
    )


def served_bytes(config: Config, facts: ModelFacts) -> int:
    """Return the bytes of an engine's live weights. In FP8, embeddings, projection and experts stay in full."""
    fp8 = config.engine.quantize == "fp8" and not facts.experts
    rounded = facts.parameters - _outer(facts) if fp8 else 0
    return (facts.parameters - rounded) * BYTES[config.model.dtype] + rounded


def _converted_copy(config: Config, facts: ModelFacts) -> int:
    """Return the bytes of a staged version after it was rounded; 0 if versions are served as they arrive."""
    return served_bytes(config, facts) if config.engine.quantize != "none" else 0


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
