"""The messages between the controller and the trainer process."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.delivery.base import Manifest
from headrace.training.base import StepReport
from headrace.types import Batch

RENDEZVOUS = "ranks.store"
"""The file in the run directory where the trainer's ranks find each other. The controller removes it before it starts
the ranks."""


class Train(Message):
    """Make one optimizer step. The answer is `Trained`. Batches are trained in the order in which they are sent."""

    batch: Batch
    publish: int | None = None
    """The version under which the weights are published after this step. None publishes nothing."""
    parent: int = -1
    save: bool = False
    """Write a checkpoint of the published weights. The trainer announces it with a `Saved` event."""


class Trained(Message):
    """The answer to `Train`: the report of the step."""

    report: StepReport


class Publish(Message):
    """Publish the current weights under this version. The trainer announces it with a `Published` event."""

    version: int
    parent: int


class Published(Message):
    """An event: a version is ready to be fetched by engines. The trainer continues to train meanwhile."""

    manifest: Manifest
    snapshot_seconds: float
    """The time for which publishing stopped the trainer."""


class Resend(Message):
    """Make all weights of a version available, for an engine that cannot use what was sent. The answer is `Resent`."""

    manifest: Manifest


class Resent(Message):
    """The answer to `Resend`: the manifest says where all weights of the version are now."""

    manifest: Manifest


class Acknowledged(Message):
    """The engines no longer need the bytes of this version."""

    version: int


class Save(Message):
    """Write a checkpoint. The answer is `Saved`."""

    version: int


class Saved(Message):
    """The path of the checkpoint of a version."""

    version: int
    path: str
