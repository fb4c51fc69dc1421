"""This module declares the trainer as the pipeline sees it: batches go in, reports and versions come out.

It does not import torch, because the controller reads reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.delivery.base import Manifest
from headrace.types import NO_VERSION, Batch


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The point that a trainer process starts from: the newest checkpoint that it found, or the model's own weights."""

    step: int = 0
    """The number of policy steps behind the checkpoint."""
    version: int = NO_VERSION
    """The version under which these weights were published."""
    found: bool = False
    """Whether there was a checkpoint. Without a checkpoint, the warm start must run too."""
    notes: list[str] = []
    """Lines for the user: which checkpoints were not used, and why."""

    @classmethod
    def of(cls, facts: Mapping[str, int | float | str]) -> Checkpoint:
        """Read the facts that a trainer sent when it became ready (see `training.serving`)."""
        return cls(
            step=int(facts["policy_steps"]),
            version=int(facts["version"]),
            found=bool(facts["resumed_from"]),
            notes=str(facts["notes"]).splitlines(),
        )


class TrainerHandle(Protocol):
    """A trainer that trains batches in the order they come.

    A published version is not part of an answer: the trainer announces it with a `Published` event.
    """

    name: str

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        """Make one optimizer step. Then publish the weights as version `publish`, if given, and save them if asked."""

    async def publish(self, version: int, parent: int) -> None:
        """Publish the current weights."""

    async def resend(self, manifest: Manifest) -> Manifest:
        """Make all weights of an already published version available again, and return the new manifest.

        The version must be acknowledged again afterwards.
        """

    async def acknowledge(self, version: int) -> None:
        """Tell the trainer that the engines no longer need the bytes of this version."""

    async def teacher_answered(self, teacher: str, version: int) -> None:
        """Tell the trainer that the process of a teacher that follows the policy has answered this version."""

    async def save(self, version: int) -> Path:
        """Write a checkpoint of the current weights and return its path."""

    async def fetch(self, path: Path) -> Path:
        """Bring a checkpoint that the trainer has saved to this host, if it is not there. Return its path here."""


class StepReport(msgspec.Struct, kw_only=True):
    """The report of one optimizer step."""

    step: int
    loss: float
    grad_norm: float
    """The norm of the gradient before clipping."""
    learning_rate: float
    tokens: int
    """The number of tokens that the forward passes computed. A shared prefix counts once, and tokens after the last
    trained token of a sequence are not computed."""
    micro_batches: int
    seconds: float
    skipped: bool = False
    """Whether the weights stayed the same, because loss or gradient were not finite or no token was trained."""
    skipped_steps: int = 0
    """The number of skipped steps since the trainer's first step, this step included."""
    metrics: dict[str, float] = {}
    """The mean of each metric over the trained tokens of the step."""
