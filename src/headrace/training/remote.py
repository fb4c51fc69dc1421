"""The trainer in another process, as the controller sees it. No torch here."""

from __future__ import annotations

from pathlib import Path

from headrace.channel.hub import Hub
from headrace.training.messages import Acknowledged, Publish, Save, Saved, Train, Trained
from headrace.training.report import StepReport
from headrace.types import Batch


class RemoteTrainer:
    """Implements `TrainerHandle` over a hub."""

    def __init__(self, hub: Hub, name: str, *, deadline: float) -> None:
        self.name = name
        self._hub = hub
        self._deadline = deadline

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        """See `TrainerHandle.train`."""
        message = Train(batch=batch, publish=publish, parent=parent, save=save)
        return (await self._hub.request(self.name, message, Trained, timeout=self._deadline)).report

    async def publish(self, version: int, parent: int) -> None:
        """See `TrainerHandle.publish`."""
        await self._hub.send(self.name, Publish(version=version, parent=parent))

    async def acknowledge(self, version: int) -> None:
        """See `TrainerHandle.acknowledge`."""
        await self._hub.send(self.name, Acknowledged(version=version))

    async def save(self, version: int) -> Path:
        """See `TrainerHandle.save`."""
        return Path((await self._hub.request(self.name, Save(version=version), Saved, timeout=self._deadline)).path)
