"""The trainer in another process, as the controller uses it. No torch is imported here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.delivery.base import Manifest
from headrace.errors import PeerDied
from headrace.training.base import StepReport
from headrace.training.messages import Acknowledged, Publish, Resend, Resent, Save, Saved, Train, Trained
from headrace.types import Batch

M = TypeVar("M", bound=Message)


class RemoteTrainer:
    """The implementation of `TrainerHandle` over a hub.

    All ranks of the trainer are sent the same messages in the same order, except `Resend`. The first rank answers for
    all.
    """

    def __init__(self, hub: Hub, name: str, *, deadline: float, others: Sequence[str] = ()) -> None:
        """Set up the handle. `name` is the first rank, and `others` are the other ranks."""
        self.name = name
        self._others = others
        self._order = asyncio.Lock()
        self._hub = hub
        self._deadline = deadline

    async def train(
        self, batch: Batch, *, publish: int | None = None, parent: int = -1, save: bool = False
    ) -> StepReport:
        """See `TrainerHandle.train`."""
        message = Train(batch=batch, publish=publish, parent=parent, save=save)
        return (await self._ask(message, Trained)).report

    async def publish(self, version: int, parent: int) -> None:
        """See `TrainerHandle.publish`."""
        await self._tell(Publish(version=version, parent=parent))

    async def resend(self, manifest: Manifest) -> Manifest:
        """See `TrainerHandle.resend`."""
        answer = await self._hub.request(self.name, Resend(manifest=manifest), Resent, timeout=self._deadline)
        return answer.manifest

    async def acknowledge(self, version: int) -> None:
        """See `TrainerHandle.acknowledge`."""
        # A trainer that died no longer holds any bytes, so there is nothing to acknowledge.
        with suppress(PeerDied):
            await self._tell(Acknowledged(version=version))

    async def save(self, version: int) -> Path:
        """See `TrainerHandle.save`."""
        return Path((await self._ask(Save(version=version), Saved)).path)

    async def _tell(self, message: Message) -> None:
        async with self._order:
            for name in (*self._others, self.name):
                await self._hub.send(name, message)

    async def _ask(self, message: Message, reply: type[M]) -> M:
        async with self._order:
            for name in self._others:
                await self._hub.send(name, message)
            answer = asyncio.create_task(self._hub.request(self.name, message, reply, timeout=self._deadline))
            # The request is sent before the lock is released, so no other message can come in between on any rank.
            await asyncio.sleep(0)
        return await answer
