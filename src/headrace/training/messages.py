"""What the controller and the trainer process say to each other."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.delivery.base import Manifest
from headrace.training.report import StepReport
from headrace.types import Batch

RENDEZVOUS = "ranks.store"
"""In the run directory: where the trainer's ranks find each other. The controller removes it before it starts them."""


class Train(Message):
    """One optimizer step; answered by `Trained`. Batches are trained in the order they are sent."""

    batch: Batch
    publish: int | None = None
    """Publish the weights after this step under this version."""
    parent: int = -1
    save: bool = False
    """Write a checkpoint of what was published; announced by `Saved` as an event."""


class Trained(Message):
    """The step's report."""

    report: StepReport


class Publish(Message):
    """Publish the present weights under this version; answered by `Published` as an event."""

    version: int
    parent: int


class Published(Message):
    """A version is ready to be fetched by engines. Sent as an event, while the trainer goes on."""

    manifest: Manifest
    snapshot_seconds: float
    """What publishing took from the trainer."""


class Resend(Message):
    """Make this version ready with all its weights, for an engine that cannot use what was sent; see `Resent`."""

    manifest: Manifest


class Resent(Message):
    """Where all weights of the version are now."""

    manifest: Manifest


class Acknowledged(Message):
    """The engines are done with this version's bytes."""

    version: int


class Save(Message):
    """Write a checkpoint; answered by `Saved`."""

    version: int


class Saved(Message):
    """Where the checkpoint of a version is."""

    version: int
    path: str
