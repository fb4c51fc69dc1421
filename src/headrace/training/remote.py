"""The trainer in another process: its messages, and the handle that the controller uses. No torch is imported here."""

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from headrace.channel.codec import Message
from headrace.channel.files import read_folder
from headrace.channel.hub import Hub
from headrace.delivery.base import Manifest
from headrace.errors import PeerDied
from headrace.training.base import StepReport
from headrace.types import Batch

RENDEZVOUS = "ranks.store"
"""The file in the run directory where ranks find each other. The controller removes it before it starts them."""


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
    teachers: list[str] = []
    """The teachers that follow the policy and are published under this version too; see `TeacherPublished`."""


class Resend(Message):
    """Make all weights of a version available, for an engine that cannot use what was sent. The answer is `Resent`."""

    manifest: Manifest


class Resent(Message):
    """The answer to `Resend`: the manifest says where all weights of the version are now."""

    manifest: Manifest


class TeacherPublished(Message):
    """An event: a version of a teacher that follows the policy is ready to be fetched by the teacher's process."""

    teacher: str
    manifest: Manifest


class TeacherAnswered(Message):
    """The teacher's process has answered this version. A newer one may be published."""

    teacher: str
    version: int


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


M = TypeVar("M", bound=Message)


class RemoteTrainer:
    """The implementation of `TrainerHandle` over a hub.

    All ranks are sent the same messages in the same order. The first rank answers for all.
    """

    def __init__(
        self,
        hub: Hub,
        name: str,
        *,
        deadline: float,
        others: Sequence[str] = (),
        checkpoints: Path | None = None,
        keep: int = 1,
    ) -> None:
        """Set up the handle. `name` is the first rank, and `others` are the other ranks.

        `checkpoints` is where this side keeps the newest `keep` checkpoints of a trainer on another host.
        """
        self._checkpoints = checkpoints
        self._keep = keep
        self.name = name
        self._others = others
        self._order = asyncio.Lock()
        self._fetching = asyncio.Lock()
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
        return (await self._ask(Resend(manifest=manifest), Resent)).manifest

    async def acknowledge(self, version: int) -> None:
        """See `TrainerHandle.acknowledge`."""
        # A trainer that died no longer holds any bytes, so there is nothing to acknowledge.
        with suppress(PeerDied):
            await self._tell(Acknowledged(version=version))

    async def teacher_answered(self, teacher: str, version: int) -> None:
        """See `TrainerHandle.teacher_answered`."""
        # A trainer that was restarted publishes every teacher again, and expects no answers to earlier versions.
        with suppress(PeerDied):
            await self._tell(TeacherAnswered(teacher=teacher, version=version))

    async def save(self, version: int) -> Path:
        """See `TrainerHandle.save`."""
        return await self.fetch(Path((await self._ask(Save(version=version), Saved)).path))

    async def fetch(self, path: Path) -> Path:
        """See `TrainerHandle.fetch`."""
        if self._checkpoints is None or path.parent == self._checkpoints.absolute():
            return path
        async with self._fetching:
            fetched = await read_folder(self._hub, self.name, path.name, self._checkpoints, self._deadline)
            for old in sorted(self._checkpoints.glob("step-*"))[: -self._keep]:
                shutil.rmtree(old.rename(old.with_name(f".partial-deleted-{old.name}")))
        return fetched

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
