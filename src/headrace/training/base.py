"""The trainer as the pipeline sees it: batches in, reports and versions out. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.delivery.base import Manifest
from headrace.training.report import StepReport
from headrace.types import NO_VERSION, Batch


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer process starts from: the newest checkpoint that it found, or the model's own weights."""

    step: int = 0
    """Optimizer steps of the policy behind the checkpoint."""
    version: int = NO_VERSION
    """The version that was published of these weights."""
    found: bool = False
    """Whether there was a checkpoint: without one even the warm start has to be made."""

    @classmethod
    def of(cls, facts: Mapping[str, int | float | str]) -> Checkpoint:
        """What a trainer said when it became ready (`training.serving`)."""
        return cls(step=int(facts["policy_steps"]), version=int(facts["version"]), found=bool(facts["resumed_from"]))


class TrainerHandle(Protocol):
    """Trains batches in the order they come. A published version is announced by `Published`, not answered."""

    name: str

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        """One optimizer step; afterwards publish the weights under a version, and save them, where that is asked."""
        ...

    async def publish(self, version: int, parent: int) -> None:
        """Publish the present weights."""
        ...

    async def resend(self, manifest: Manifest) -> Manifest:
        """The same version with all its weights; to be acknowledged again."""
        ...

    async def acknowledge(self, version: int) -> None:
        """The engines no longer need this version's bytes."""
        ...

    async def save(self, version: int) -> Path:
        """Write a checkpoint of the present weights; returns where it is."""
        ...
