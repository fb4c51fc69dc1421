"""The versions of teachers that follow the policy: each is brought to the teacher's process, and proved there.

    the trainer publishes ──▶ newest ──▶ the teacher's engine loads and proves it ──▶ the trainer may publish the next

A teacher's version is the version of the policy at which it was made. The trainer publishes no newer one before the
last one was answered, so training never waits for a teacher. A process that was restarted gets the newest version
again. A version that is refused is not used: the teacher keeps the one before it, or waits for the next.
"""

import asyncio

from headrace.delivery.base import Manifest
from headrace.errors import ChannelError, PeerDied
from headrace.pipeline.recording import Recorder
from headrace.scoring.base import ScoreError, Stage
from headrace.training.base import TrainerHandle
from headrace.types import NO_VERSION


class TeacherVersions:
    """The newest version of every teacher that follows the policy, and its way to the teacher's process."""

    def __init__(self, scoring: Stage, trainer: TrainerHandle, recorder: Recorder) -> None:
        self._processes = scoring.moving
        self._trainer = trainer
        self._recorder = recorder
        self._newest: dict[str, Manifest] = {}
        self._refreshing: set[str] = set()

    def published(self, teacher: str, manifest: Manifest, tasks: asyncio.TaskGroup) -> None:
        """Bring this version to the teacher's process."""
        self._newest[teacher] = manifest
        self._begin(teacher, tasks)

    def returned(self, process: str, tasks: asyncio.TaskGroup) -> None:
        """Bring the newest version to a process that was restarted, if it is that of a teacher."""
        for teacher, one in self._processes.items():
            if one.name == process and teacher in self._newest:
                self._begin(teacher, tasks)

    def _begin(self, teacher: str, tasks: asyncio.TaskGroup) -> None:
        if teacher not in self._refreshing:
            self._refreshing.add(teacher)
            tasks.create_task(self._refresh(teacher), name=f"refresh the teacher {teacher}")

    async def _refresh(self, teacher: str) -> None:
        process, answered = self._processes[teacher], NO_VERSION
        try:
            while (manifest := self._newest[teacher]).version > max(process.proved, answered):
                try:
                    proof = await process.load(manifest)
                except (ScoreError, ChannelError) as error:
                    # If the process has died, it gets the version when it is back.
                    self._recorder.note(f"the teacher {teacher!r} did not take version {manifest.version}: {error}")
                    return
                answered = manifest.version
                self._recorder.teacher_refreshed(teacher, manifest, proof)
                try:
                    await self._trainer.teacher_answered(teacher, manifest.version)
                except PeerDied:
                    return
        finally:
            self._refreshing.discard(teacher)
