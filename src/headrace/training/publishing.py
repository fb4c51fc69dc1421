"""The publisher of a trainer rank, built from the configuration: what is sent, in which dtype, through which sender."""

from __future__ import annotations

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.delivery.base import Kind
from headrace.delivery.canary import canary_sequence
from headrace.delivery.parts import TrainerRanks
from headrace.delivery.publisher import Publisher
from headrace.delivery.setup import make_sender
from headrace.training.devices import engine_device
from headrace.training.ranks import Ranks


def make_publisher(
    link: WorkerLink, config: Config, ranks: Ranks | None, vocabulary: int, base_digest: int, *, device: str = "cpu"
) -> Publisher:
    """Return the publisher of this process: for the whole model, or for this rank's part of the model."""
    canary = canary_sequence(vocabulary, config.delivery.canary_tokens)
    tolerance, deadline = config.delivery.canary_tolerance, config.delivery.deadline
    rank = ranks.rank if ranks else 0
    sender = make_sender(
        config.delivery,
        link.run_dir,
        rank,
        trainer=device if ranks is None else str(ranks.device),
        engines=engine_device(config),
        receivers=config.engine.count,
        relays=ranks is None,  # an engine can relay the whole model, but not the parts in which it arrived
    )
    send: Kind = "adapter" if config.lora is not None else config.delivery.send
    return Publisher(
        sender,
        published_dtype(config),
        tolerance,
        canary,
        send=send,
        base_digest=base_digest,
        deadline=deadline,
        policy=config.policy_name,
        ranks=TrainerRanks(ranks.publishing, ranks.coordinate) if ranks else None,
    )


def published_dtype(config: Config) -> str:
    """Return the dtype in which weights are sent.

    An adapter that engines merge is sent in float32 and is rounded only after it is merged.
    """
    if config.lora is not None and config.lora.serve == "merged":
        return "float32"
    return config.delivery.dtype or config.model.dtype
