"""A running group is late by its oldest token, whichever of its traces has it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.pipeline.attempts import STALE, Attempts
from headrace.types import Group, Prompt, Trace


class Running:
    """An episode with a trace for each of these versions; it notes why it was told to end."""

    def __init__(self, *versions: int) -> None:
        nothing = Trace.of_context(np.zeros(1, np.int32))
        self.traces = [nothing.extended([7], [-1.0], [version], trained=True) for version in versions]
        self.id = "0/0"
        self.plan = SimpleNamespace(saved=())
        self.ended: list[str] = []

    async def cancel(self, reason: str) -> None:
        self.ended.append(reason)


class ThirdVersion:
    """A window that trains version 3, and no token of a version before 2."""

    on_stale, max_lag, trained_version = "drop", 1, 3

    def late(self, version: int) -> bool:
        return version < 2

    def stale(self) -> list[Group]:
        return []

    ready_groups = surplus = stale


@pytest.mark.parametrize(("versions", "ended"), [((2, 1), [STALE]), ((1, 2), [STALE]), ((2, 3), []), ((), [])])
async def test_the_oldest_token_of_all_traces_counts(versions: tuple[int, ...], ended: list[str]) -> None:
    episode = Running(*versions)
    attempts = Attempts(cast(Any, None), cast(Any, ThirdVersion()), cast(Any, SimpleNamespace()), [])
    attempts.started(Group(id=0, prompt=Prompt(id="p"), version=2), [cast(Any, episode)])
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        attempts.run_in(tasks)
        attempts.sweep()
    assert episode.ended == ended
