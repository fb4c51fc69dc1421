"""The versions of teachers that follow the policy: each is brought to the teacher's process, and proved there.

    the trainer publishes ──▶ newest ──▶ the teacher's engine loads and proves it ──▶ the trainer may publish the next

A teacher's version is the version of the policy at which it was made. The trainer publishes no newer one before the
last one was answered, so training never waits for a teacher. A process that was restarted gets the newest version
again. A process that does not answer, or answers with an error instead of a proof, is ended, and supervision restarts
it. A version that is refused is sent again, up to `ATTEMPTS` times in all. After that it is not used: the teacher keeps
the version before it, or waits for the next one.

At depth 0 the controller waits until the teachers of a version have answered, before groups begin under that version.
So the teacher that scores a rollout does not depend on the speed of the processes.
"""

import asyncio
from collections.abc import Iterable

from headrace.delivery.base import Manifest
from headrace.errors import ChannelError, PeerDied
from headrace.pipeline.parts import Parts
from headrace.scoring.base import MovingProcess, ScoreError
from headrace.types import NO_VERSION

ATTEMPTS = 3
"""How often a version is sent to a teacher's process that refuses it."""


class TeacherVersions:
    """The newest version of every teacher that follows the policy, and its way to the teacher's process."""

    def __init__(self, parts: Parts) -> None:
        self._teachers = parts.scoring.moving
        self._trainer = parts.trainer
        self._recorder = parts.recorder
        self._processes = parts.processes
        self._waits = parts.waits
        self._newest: dict[str, Manifest] = {}
        self._announced: dict[str, int] = {}
        """The newest version of each teacher that the trainer publishes or has published."""
        self._answered: dict[str, int] = {}
        """The newest version of each teacher that its process has answered."""
        self._refreshing: set[str] = set()

    def announced(self, version: int, teachers: Iterable[str]) -> None:
        """Record that the trainer publishes these teachers under this version."""
        self._announced |= dict.fromkeys(teachers, version)

    @property
    def unanswered(self) -> list[str]:
        """The teachers whose newest version has no answer yet."""
        return [one for one, version in self._announced.items() if self._answered.get(one, NO_VERSION) < version]

    def published(self, teacher: str, manifest: Manifest, tasks: asyncio.TaskGroup) -> None:
        """Bring this version to the teacher's process."""
        self._newest[teacher] = manifest
        self._begin(teacher, tasks)

    def returned(self, process: str, tasks: asyncio.TaskGroup) -> None:
        """Bring the newest version to a process that was restarted, if it is that of a teacher."""
        for teacher, one in self._teachers.items():
            if one.name == process and teacher in self._newest:
                self._begin(teacher, tasks)

    def _begin(self, teacher: str, tasks: asyncio.TaskGroup) -> None:
        if teacher not in self._refreshing:
            self._refreshing.add(teacher)
            tasks.create_task(self._refresh(teacher), name=f"refresh the teacher {teacher}")

    async def _refresh(self, teacher: str) -> None:
        """Bring the newest version to the process, until there is no newer one or the process is lost."""
        answered: Manifest | None = None
        try:
            while (manifest := self._newest[teacher]) is not answered:
                if not await self._bring(teacher, self._teachers[teacher], manifest):
                    return  # The version is brought again when the process is back.
                answered = manifest
                await self._trainer.teacher_answered(teacher, manifest.version)
                self._answered[teacher] = manifest.version
                self._waits.moved()
        finally:
            self._refreshing.discard(teacher)

    async def _bring(self, teacher: str, process: MovingProcess, manifest: Manifest) -> bool:
        """Return whether the process has answered: it holds the version, or refused it in all attempts."""
        for _ in range(ATTEMPTS):
            # A trainer that was restarted may publish a version that the process has proved already.
            if process.proved >= manifest.version:
                return True
            try:
                proof = await process.load(manifest)
            except (ScoreError, ChannelError) as error:
                self._recorder.note(f"the teacher {teacher!r} did not take version {manifest.version}: {error}")
                if not isinstance(error, (ScoreError, PeerDied)):
                    self._recorder.note(f"{process.name} is ended")
                    self._processes.kill(process.name)
                return False
            self._recorder.teacher_refreshed(teacher, manifest, proof)
        if process.proved == NO_VERSION:
            self._recorder.note(f"the teacher {teacher!r} has no proved version, and waits for the next one")
        return True
