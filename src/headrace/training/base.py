"""The trainer as the pipeline sees it: batches in, reports and versions out. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from headrace.delivery.base import Manifest
from headrace.training.report import StepReport
from headrace.types import Batch


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
