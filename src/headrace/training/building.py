"""This module builds what a configuration describes: the trainer at its first weights, and its publisher.

Runs and replays both use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.config.schema import LoraConfig, TrainingConfig
from headrace.delivery.canary import canary_sequence
from headrace.delivery.digest import digest_as
from headrace.delivery.parts import TrainerRanks
from headrace.delivery.publisher import Publisher
from headrace.delivery.setup import make_sender
from headrace.models.loading import load_model, named_weights
from headrace.models.lora import frozen_linears
from headrace.models.rounding import hold_in_four_bits, round_weights
from headrace.observe.spans import SpanRecorder
from headrace.training.checkpoints.base import BASES, keep_base
from headrace.training.devices import choose_device, engine_device, input_device
from headrace.training.layers import compile_model, decoder_layers, recompute_layers
from headrace.training.lora import TrainedAdapter
from headrace.training.ranks import Ranks, shard_model
from headrace.training.trainer import Trainer


@dataclass(frozen=True)
class Built:
    """A trainer at its first weights."""

    trainer: Trainer
    device: str
    ranks: Ranks | None
    base_digest: int
    """The digest of the base model with [lora]; else 0."""


def build_trainer(
    config: Config,
    checkpoints: Path,
    spans: SpanRecorder | None = None,
    meet: Callable[[str], Ranks | None] = lambda device: None,
) -> Built:
    """Build the trainer that a configuration describes, before its first step.

    `meet` is called with the device once the model is loaded, and returns this process's place among the ranks. By
    default the trainer has a single rank.
    """
    device = choose_device(config.training.device)
    in_four_bits = config.lora is not None and config.lora.base == "nf4"
    # Master weights are float32 whatever the serving dtype is, because small updates would vanish in bfloat16.
    model = load_model(
        config.model.path,
        weights=config.model.weights,
        dtype="float32",
        seed=config.run.seed,
        # A GPU may not have room for the whole model: with several ranks each rank shards it on the host, and 4 bits
        # are packed there.
        device="cpu" if config.training.offload or config.training.ranks > 1 or in_four_bits else device,
    )
    adapter, base_digest = None, 0
    if config.lora is not None:
        base, base_digest = _freeze(model, config, config.lora, checkpoints)
        if in_four_bits:
            model.to(device)
        adapter = TrainedAdapter(model, config.lora, base=base, seed=config.run.seed)
    ranks = meet(device)
    trainer = Trainer(
        prepare_model(model, config.training, ranks),
        config.algorithm,
        config.training,
        total_steps=config.run.versions * config.delivery.publish_every,
        warm_start=config.warm_start,
        teacher=_teacher(config, input_device(model)),
        ranks=ranks,
        spans=spans,
        adapter=adapter,
        correct_above=config.buffer.correct_above,
    )
    return Built(trainer, device, ranks, base_digest)


def prepare_model(model: Any, training: TrainingConfig, ranks: Ranks | None = None) -> Any:
    """Prepare a model, which every rank holds as a whole, for training as configured. The model is changed in place."""
    device = next(model.parameters()).device if ranks is None else ranks.device
    if training.compile and device.type == "cuda":
        compile_model(model, decoder_layers(model))
    if training.activation_checkpointing:
        # This wraps the compiled layers, so that what is computed again is compiled too.
        recompute_layers(decoder_layers(model))
    if ranks is not None:
        shard_model(model, decoder_layers(model), ranks, training)
    return model


def _freeze(model: Any, config: Config, lora: LoraConfig, checkpoints: Path) -> tuple[Path, int]:
    """Make this model the base of an adapter. Return the directory from which others load it, and its digest."""
    layers = frozen_linears(model, tuple(lora.modules)) if lora.base == "nf4" else {}
    round_weights(layers)
    digest = digest_as(named_weights(model), config.model.dtype)
    base = Path(config.model.path)
    if layers or config.model.weights == "random":
        base = keep_base(model, checkpoints, base, BASES[lora.base])
    hold_in_four_bits(model, layers)
    return base, digest


def _teacher(config: Config, device: torch.device) -> Any:
    """Load the frozen teacher, whole on every rank, on the device of the passes. On a GPU 16 bits are enough for it."""
    if config.algorithm.teacher is None:
        return None
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    return load_model(config.algorithm.teacher, dtype=dtype, device=str(device)).requires_grad_(False)


def make_publisher(link: WorkerLink, config: Config, built: Built) -> Publisher:
    """Return the publisher of this process: for the whole model, or for this rank's part of the model."""
    delivery, ranks = config.delivery, built.ranks
    sender = make_sender(
        delivery,
        link.run_dir,
        ranks.rank if ranks else 0,
        trainer=str(ranks.device) if ranks else built.device,
        engines=engine_device(config),
        receivers=config.engine.count,
        relays=ranks is None,  # an engine can relay the whole model, but not the parts in which it arrived
    )
    return Publisher(
        sender,
        published_dtype(config),
        delivery.canary_tolerance,
        canary_sequence(built.trainer.model.config.vocab_size, delivery.canary_tokens),
        send="adapter" if config.lora is not None else delivery.send,
        base_digest=built.base_digest,
        deadline=delivery.deadline,
        policy=config.policy_name,
        ranks=TrainerRanks(ranks.publishing, ranks.coordinate) if ranks else None,
    )


def published_dtype(config: Config) -> str:
    """Return the dtype in which weights are sent. An adapter that engines merge is rounded only after it is merged."""
    if config.lora is not None and config.lora.serve == "merged":
        return "float32"
    return config.delivery.dtype or config.model.dtype
