"""Which deaths of a worker are worth another start, and how many in a row; processes are played by the test."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from headrace.channel.events import Died, Events, Returned
from headrace.channel.vital import EXIT_LOST
from headrace.channel.worker_link import WorkerLink
from headrace.cluster import supervision
from headrace.cluster.base import EXIT_USER_ERROR
from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.placement import Place
from headrace.cluster.supervision import Fleet
from headrace.errors import PeerDied, UserError

SECONDS = 60.0
ENGINE = "engine-0"


class Played:
    """A launcher whose processes end when the test says so."""

    def __init__(self) -> None:
        self.starts = 0
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()

    async def start(self, spec: WorkerSpec) -> None:
        self.starts += 1
        self.spec = spec

    def becomes_ready(self, ready: bool = True) -> None:
        """What the process of the newest start says over the wire."""
        self.link = WorkerLink(ENGINE, self.spec.address, Path(), on_lost=lambda: None, epoch=self.spec.epoch)
        self.link.start()
        if ready:
            self.link.ready(start=self.starts)

    async def next_exit(self) -> Exit:
        return await asyncio.wait_for(self.exits.get(), SECONDS)

    def kill(self, name: str) -> None:
        self.ends(-9, "")

    async def stop(self, grace: float) -> None:
        self.link.close()

    def ends(self, code: int, last_line: str) -> None:
        self.link.close()
        self.exits.put_nowait(Exit(name=ENGINE, code=code, last_lines=f"earlier\n{last_line}"))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def supervised(tmp_path: Path, play: Callable[[Fleet, Played], Awaitable[None]]) -> list[PeerDied]:
    """Run `play` beside the watch over one engine that is ready; the deaths that were told."""
    launcher, events = Played(), Events()
    fleet = Fleet(launcher, tmp_path, [Place(role="engine", rank=0, host="localhost")], events, {ENGINE: 2})
    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(fleet.watch())
            starting = tasks.create_task(fleet.start(SECONDS))
            await until(lambda: launcher.starts == 1)
            launcher.becomes_ready()
            await starting
            await play(fleet, launcher)
            watching.cancel()
    finally:
        await fleet.stop()
    return [event.death for event in await events.take() if isinstance(event, Died)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)


async def test_what_lost_what_it_depends_on_is_started_again_and_says_what(tmp_path: Path) -> None:
    async def play(fleet: Fleet, launcher: Played) -> None:
        launcher.ends(EXIT_LOST, "vLLM died: it cannot be reached")
        await until(lambda: launcher.starts == 2)
        assert fleet.restarting == {ENGINE}
        launcher.becomes_ready()
        await until(lambda: fleet.facts(ENGINE) == {"start": 2})
        fleet.rejoined(ENGINE)
        assert not fleet.restarting

    (death,) = await supervised(tmp_path, play)
    assert str(death) == "engine-0 died: vLLM died: it cannot be reached"


@pytest.mark.parametrize(("code", "starts"), [(-9, 2), (1, 1), (EXIT_USER_ERROR, 1)])
async def test_what_is_killed_while_the_run_starts_is_started_again_and_what_fails_is_not(
    tmp_path: Path, code: int, starts: int
) -> None:
    launcher, events = Played(), Events()
    fleet = Fleet(launcher, tmp_path, [Place(role="engine", rank=0, host="localhost")], events, {ENGINE: 2})
    ended = None
    try:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(fleet.watch())
            starting = tasks.create_task(fleet.start(SECONDS))
            await until(lambda: launcher.starts == 1)
            launcher.becomes_ready(ready=False)
            launcher.ends(code, "it has failed")
            await until(lambda: launcher.starts == 2)
            launcher.becomes_ready()
            await starting
            await until(lambda: not fleet.restarting)
            watching.cancel()
    except ExceptionGroup as error:
        ended = error
    finally:
        await fleet.stop()
    assert launcher.starts == starts
    assert (ended is None) == (starts == 2)
    # The controller was not there yet, and must not hear of a return.
    assert not any(isinstance(event, Returned) for event in await events.take())


async def test_a_mistake_ends_the_run_at_once_but_counts_as_a_death_while_coming_back(tmp_path: Path) -> None:
    async def mistaken(fleet: Fleet, launcher: Played) -> None:
        launcher.ends(EXIT_USER_ERROR, "[model] path: no")
        await until(lambda: launcher.starts == 2)

    with pytest.raises(ExceptionGroup) as caught:
        await supervised(tmp_path, mistaken)
    assert caught.group_contains(UserError, match=r"^\[model\] path: no$")

    async def dies_twice_on_its_way(fleet: Fleet, launcher: Played) -> None:
        for life in (2, 3):
            launcher.ends(EXIT_LOST if life == 2 else EXIT_USER_ERROR, "the vLLM server ended")
            await until(lambda life=life: launcher.starts == life)
        launcher.ends(EXIT_USER_ERROR, "the vLLM server ended again")
        await until(lambda: launcher.starts == 4)

    with pytest.raises(ExceptionGroup) as caught:
        await supervised(tmp_path, dies_twice_on_its_way)
    assert caught.group_contains(UserError, match="^the vLLM server ended again$")


async def test_what_ends_by_itself_before_it_is_killed_keeps_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "EXIT_NEWS_SECONDS", 0.2)

    async def ends_by_itself(fleet: Fleet, launcher: Played) -> None:
        fleet.kill(ENGINE)
        await asyncio.sleep(0.02)
        launcher.ends(EXIT_USER_ERROR, "[delivery] transport: no ears")
        await until(lambda: launcher.starts == 2)

    with pytest.raises(ExceptionGroup) as caught:
        await supervised(tmp_path, ends_by_itself)
    assert caught.group_contains(UserError, match="no ears$")

    async def goes_on(fleet: Fleet, launcher: Played) -> None:
        fleet.kill(ENGINE)
        await asyncio.sleep(0.1)
        fleet.kill(ENGINE)
        await until(lambda: launcher.starts == 2)
        launcher.becomes_ready()
        await until(lambda: fleet.facts(ENGINE) == {"start": 2})
        await asyncio.sleep(0.3)
        assert fleet.facts(ENGINE) == {"start": 2}, "the second kill was meant for the process that is gone"

    (death,) = await supervised(tmp_path, goes_on)
    assert str(death) == "engine-0 died: killed by signal 9"


async def test_a_slow_start_is_no_time_of_good_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two deaths in a row before it was ready again end it, however long ago it was ready first."""
    monkeypatch.setattr(supervision, "HEALTHY_SECONDS", 0.05)

    async def dies_slowly(fleet: Fleet, launcher: Played) -> None:
        for life in (2, 3):
            launcher.ends(-9, "")
            await until(lambda life=life: launcher.starts == life)
            await asyncio.sleep(0.1)
        launcher.ends(-9, "")
        await until(lambda: launcher.starts == 4)

    with pytest.raises(ExceptionGroup) as caught:
        await supervised(tmp_path, dies_slowly)
    assert caught.group_contains(PeerDied, match="engine-0 died: killed by signal 9")
