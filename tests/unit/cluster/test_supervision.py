"""Processes that die and come back, over the real wire; a process is a thread here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.channel.codec import Message
from headrace.channel.events import Events, Returned
from headrace.channel.heartbeats import Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.cluster import supervision
from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.placement import Place
from headrace.cluster.supervision import Fleet
from headrace.errors import PeerDied
from waiting import until


class Threads:
    """Implements `Launcher`: each worker is a link, which says hello when `slow` seconds have passed."""

    def __init__(self) -> None:
        self.links: dict[str, WorkerLink] = {}
        self.killed: list[str] = []
        self.started = 0
        self.slow = 0.0
        self.events = Events()
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self, spec: WorkerSpec) -> None:
        self.started += 1
        self._starting.add(asyncio.create_task(self._start(spec)))

    async def _start(self, spec: WorkerSpec) -> None:
        await asyncio.sleep(self.slow)
        link = WorkerLink(spec.name, spec.address, Path(spec.run_dir), on_lost=lambda: None, epoch=spec.epoch)
        self.links[spec.name] = link
        link.start()
        link.ready()

    async def next_exit(self) -> Exit:
        return await self._exits.get()

    def die(self, name: str, code: int = -9) -> None:
        self.links.pop(name).close()
        self._exits.put_nowait(Exit(name=name, code=code, last_lines=""))

    def kill(self, name: str) -> None:
        self.killed.append(name)
        if name in self.links:
            self.die(name)

    async def stop(self, grace: float) -> None:
        for link in self.links.values():
            link.close()


@contextlib.asynccontextmanager
async def fleet_of(launcher: Threads, tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(
        launcher, tmp_path, [Place(role="trainer", rank=0, host="localhost")], launcher.events, {"trainer-0": 3}
    )
    watching = asyncio.create_task(fleet.watch())
    try:
        await fleet.start(10)
        yield fleet
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.stop()


async def test_what_is_sent_to_a_process_that_is_being_started_fails_and_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "EXIT_NEWS_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.05)
    launcher = Threads()
    async with fleet_of(launcher, tmp_path) as fleet:
        launcher.slow = 0.6
        launcher.die("trainer-0")
        await until(lambda: launcher.started == 2)
        with pytest.raises(PeerDied, match="killed by signal 9"):
            await fleet.hub.send("trainer-0", Stop())
        async with asyncio.timeout(10):
            while not any(isinstance(event, Returned) for event in await launcher.events.take()):
                pass
        assert launcher.killed == []
        await fleet.hub.send("trainer-0", Stop())
        await until(lambda: (said := launcher.links["trainer-0"].next_message()) and isinstance(said.message, Stop))


class Doubted(Hub):
    """A hub that says when it is told to that a peer cannot be reached."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[str, Message], None],
        on_silence: Callable[[PeerDied], None],
        *rest: Any,
        **named: Any,
    ) -> None:
        super().__init__(address, on_message, on_silence, *rest, **named)
        self.doubt = on_silence


async def test_a_process_that_is_heard_again_is_left_alone_and_one_that_is_not_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "EXIT_NEWS_SECONDS", 0.1)
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(supervision, "Hub", Doubted)
    launcher = Threads()
    async with fleet_of(launcher, tmp_path) as fleet:
        assert isinstance(fleet.hub, Doubted)
        fleet.hub.doubt(PeerDied("trainer-0", "unreachable (Host unreachable)"))
        await asyncio.sleep(0.3)
        assert launcher.killed == [], "its beats come"
        launcher.links["trainer-0"].close()
        await until(lambda: launcher.killed == ["trainer-0"])
        await until(lambda: launcher.started == 2 and "trainer-0" in fleet.hub.peers)


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ({"trainer-0": 1, "trainer-1": -9}, "trainer-1 died: killed by signal 9"),
        ({"trainer-1": -9, "trainer-0": 1}, "trainer-1 died: killed by signal 9"),
        ({"trainer-0": 1, "engine-0": -9, "trainer-1": 1}, "trainer-0 died: exit code 1"),
    ],
)
async def test_of_ranks_that_die_together_the_one_that_was_killed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: dict[str, int], told: str
) -> None:
    monkeypatch.setattr(supervision, "EXIT_NEWS_SECONDS", 0.3)
    launcher = Threads()
    workers = [("trainer", 0), ("trainer", 1), ("engine", 0)]
    places = [Place(role=role, rank=rank, host="localhost") for role, rank in workers]
    fleet = Fleet(launcher, tmp_path, places, Events())
    watching = asyncio.create_task(fleet.watch())
    try:
        await fleet.start(10)
        for name, code in codes.items():
            launcher.die(name, code)
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(watching, 60)
        assert [str(error) for error in raised.value.exceptions] == [told]
    finally:
        await fleet.stop()
