"""Versions of a teacher on their way to its process: refused, lost, late, and published once more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_parts import FakeRun

from headrace.channel.events import Heard
from headrace.delivery.base import Canary, Manifest, Proof
from headrace.errors import DeadlineError, HeadraceError, PeerDied
from headrace.pipeline.teacher_versions import ATTEMPTS, TeacherVersions
from headrace.training.remote import Published, TeacherPublished
from headrace.types import NO_VERSION

PROCESS = "scorer-0"


def manifest_of(version: int) -> Manifest:
    canary = Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32))
    places = {"transport": "shm", "location": "", "entries": [], "plan_digest": 0, "digest": 0, "canary": canary}
    return Manifest(version=version, parent=-1, step=0, **places)


class Run:
    """The process of a teacher, the trainer, the recorder and the supervisor of one run."""

    name = PROCESS

    def __init__(self) -> None:
        self.moving = {"ema": self}
        self.proved = NO_VERSION
        self.loaded: list[int] = []
        self.answered: list[int] = []
        self.killed: list[str] = []
        self.notes: list[str] = []
        self.answer: Callable[[int], Any] = lambda version: True
        """Whether a load of this version is accepted, or the error in its place."""
        parts: Any = self
        self.scoring = self.trainer = self.recorder = self.processes = self.waits = parts
        self.versions = TeacherVersions(parts)

    async def load(self, manifest: Manifest) -> Proof:
        self.loaded.append(manifest.version)
        await asyncio.sleep(0)
        answer = self.answer(manifest.version)
        if isinstance(answer, HeadraceError):
            raise answer
        if answer:
            self.proved = manifest.version
        elif answer is None:
            self.proved = NO_VERSION
        return Proof(engine=PROCESS, version=manifest.version, accepted=bool(answer), reason="no")

    async def teacher_answered(self, teacher: str, version: int) -> None:
        self.answered.append(version)

    def teacher_refreshed(self, teacher: str, manifest: Manifest, proof: Proof) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def moved(self) -> None: ...

    def kill(self, name: str) -> None:
        self.killed.append(name)

    async def publish(self, *versions: int) -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            for version in versions:
                self.versions.published("ema", manifest_of(version), tasks)

    async def back(self, process: str = PROCESS) -> None:
        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            self.versions.returned(process, tasks)


async def test_the_newest_version_is_brought_and_answered() -> None:
    run = Run()
    await run.publish(0)
    run.versions.announced(2, ["ema"])
    assert run.versions.unanswered == ["ema"]
    await run.publish(1, 2)
    assert (run.loaded, run.answered, run.proved) == ([0, 2], [0, 2], 2)
    assert run.versions.unanswered == []


async def test_a_refused_version_is_sent_again_and_then_answered() -> None:
    run = Run()
    run.answer = lambda version: version == 0 or len(run.loaded) == 3
    await run.publish(0)
    await run.publish(1)
    assert (run.loaded, run.answered, run.proved) == ([0, 1, 1], [0, 1], 1)
    run.answer = lambda version: False
    await run.publish(2)
    assert run.loaded[3:] == [2] * ATTEMPTS
    # The trainer hears of it, so that it can publish the next one. The old version teaches meanwhile.
    assert (run.answered[-1], run.proved) == (2, 1)
    run.answer = lambda version: None
    await run.publish(3)
    assert run.proved == NO_VERSION
    assert run.notes == ["the teacher 'ema' has no proved version, and waits for the next one"]


@pytest.mark.parametrize(
    ("error", "killed"), [(PeerDied(PROCESS, "killed"), []), (DeadlineError("no answer"), [PROCESS])]
)
async def test_a_process_that_is_lost_or_silent_gets_the_version_when_it_is_back(
    error: HeadraceError, killed: list[str]
) -> None:
    run = Run()
    run.answer = lambda version: error
    await run.publish(5)
    assert (run.loaded, run.answered, run.killed) == ([5], [], killed)
    run.answer = lambda version: True
    await run.back("scorer-1")
    assert run.loaded == [5]
    await run.back()
    assert (run.loaded, run.answered, run.proved) == ([5, 5], [5], 5)
    # A process that was restarted holds nothing, also if it had answered.
    run.proved = NO_VERSION
    await run.back()
    assert (run.loaded, run.proved) == ([5, 5, 5], 5)


async def test_a_restarted_trainer_gets_an_answer_to_a_version_that_is_proved_already() -> None:
    run = Run()
    await run.publish(5)
    await run.publish(5)
    assert (run.loaded, run.answered) == ([5], [5, 5])


async def test_at_depth_0_a_version_begins_when_its_teacher_has_answered(tmp_path: Path) -> None:
    teacher, seen = Run(), []

    def judge(prompt: Any, completion: str) -> float:
        seen.append((teacher.proved, run.controller.versions.proved))
        return float(len(completion) % 2)

    run = FakeRun(tmp_path, "buffer.depth=0", judge=judge)
    parts = run.controller.parts
    parts.scoring.moving = {"ema": teacher}
    run.trainer.teacher_answered = teacher.teacher_answered
    run.recorder.teacher_refreshed = teacher.teacher_refreshed
    run.controller.teachers = TeacherVersions(parts)

    async def slowly(manifest: Manifest) -> Proof:
        await asyncio.sleep(0.05)
        return await Run.load(teacher, manifest)

    async def publish(version: int, parent: int) -> None:
        await plain(version, parent)
        run.events.put(Heard("trainer-0", TeacherPublished(teacher="ema", manifest=manifest_of(version))))

    plain, teacher.load = run.trainer.publish, slowly
    run.trainer.publish = publish
    put = run.events.put

    def naming_teachers(event: Any) -> None:
        match event:
            case Heard(name, Published(manifest=manifest)):
                event = Heard(name, Published(manifest=manifest, snapshot_seconds=0.0, teachers=["ema"]))
        put(event)

    run.events.put = naming_teachers
    await run.run()
    assert len(seen) == 20
    assert all(proved == version for proved, version in seen)
    assert teacher.answered == list(range(6))
