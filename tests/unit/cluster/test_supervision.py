"""Processes that die and come back, over the real wire; a process is a thread here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.channel.codec import Message
from headrace.channel.events import Died, Event, Events, Returned
from headrace.channel.heartbeats import Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.cluster import supervision
from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.placement import Place
from headrace.cluster.supervision import Fleet
from headrace.errors import PeerDied, UserError
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

    def exit_unheard(self, name: str, code: int) -> None:
        """A process ends that has not said hello yet."""
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


ENGINE = Place(role="engine", rank=3, host="localhost")


async def news(launcher: Threads) -> list[Event]:
    """What was reported about deaths and restarts so far."""
    return [event for event in await launcher.events.take() if isinstance(event, Died | Returned)]


async def test_a_worker_joins_and_leaves_a_live_fleet_and_its_end_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "STOP_SECONDS", 0.2)
    launcher = Threads()
    async with fleet_of(launcher, tmp_path) as fleet:
        for time in (1, 2):
            await fleet.add(ENGINE, 3)
            assert "engine-3" in fleet.hub.peers and launcher.started == 1 + time
            await fleet.remove("engine-3")  # It does not end by itself, and is killed.
            assert launcher.killed == ["engine-3"] * time
            assert fleet.hub.peers == ["trainer-0"] and set(fleet.phases) <= {"trainer-0"}
            with pytest.raises(PeerDied, match="it was removed from the run"):
                await fleet.hub.send("engine-3", Stop())
        assert await news(launcher) == []
        assert fleet.restarting == set()


async def test_a_worker_that_dies_before_it_is_ready_is_given_up_and_the_others_go_on(tmp_path: Path) -> None:
    launcher = Threads()
    async with fleet_of(launcher, tmp_path) as fleet:
        launcher.slow = 100.0
        for code, reason in ((1, "exit code 1"), (-9, "killed by signal 9")):
            adding = asyncio.create_task(fleet.add(ENGINE, 3))
            started = launcher.started
            await until(lambda before=started: launcher.started > before)
            launcher.exit_unheard("engine-3", code)
            with pytest.raises(UserError, match=f"engine-3 died: {reason}"):
                await adding
            await fleet.remove("engine-3")
        adding = asyncio.create_task(fleet.add(ENGINE, 3))
        await until(lambda: launcher.started == 4)
        removing = asyncio.create_task(fleet.remove("engine-3"))
        with pytest.raises(UserError, match="engine-3 is not needed any more"):
            await adding
        launcher.exit_unheard("engine-3", 0)
        await removing
        assert await news(launcher) == []


async def test_a_worker_that_leaves_while_it_waits_for_its_restart_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.3)
    launcher = Threads()
    async with fleet_of(launcher, tmp_path) as fleet:
        await fleet.add(ENGINE, 3)
        launcher.die("engine-3")
        await until(lambda: fleet.restarting == {"engine-3"})
        await fleet.remove("engine-3")
        await asyncio.sleep(0.6)
        assert launcher.started == 2 and fleet.restarting == set()
        await fleet.add(ENGINE, 3)
        assert launcher.started == 3 and "engine-3" in fleet.hub.peers
