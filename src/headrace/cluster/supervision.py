"""Supervision starts the worker processes of a run, waits until they are ready, watches them, and ends them.

Messages from workers and news of their deaths go to one queue of events. A process that dies is restarted where that is
allowed, each time after a longer pause and a limited number of times. Otherwise its death ends the run, with its last
lines of output: so does that of a process which fails by itself while the run starts. A run that ends leaves no process
behind.

On several hosts, silence alone says that a worker is dead, whatever a launcher knows. A worker of a host that cannot be
reached is started again there once the host is back; until then its deaths do not count. Every start has a new
epoch: the hub refuses an older process that returns.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.channel.codec import Message
from headrace.channel.events import Awaited, Died, Dropped, Events, Heard, Returned
from headrace.channel.heartbeats import (
    SILENCE_SECONDS,
    FailureReason,
    Heartbeat,
    Hello,
    LogText,
    MeetingPoint,
    MeetingRequest,
    Ready,
    Stop,
)
from headrace.channel.hub import Hub
from headrace.channel.vital import EXIT_LOST
from headrace.cluster.base import EXIT_USER_ERROR, Processes
from headrace.cluster.launchers.base import ClusterLauncher, Exit, Launcher, WorkerSpec
from headrace.cluster.launchers.exits import log_end
from headrace.cluster.meeting import Meeting
from headrace.cluster.placement import Host, Place, move
from headrace.cluster.socket_dir import SocketDir, sweep_socket_dirs
from headrace.errors import ChannelError, DeadlineError, PeerDied, UserError

STOP_SECONDS = 10.0
FIRST_PAUSE = 0.5
"""Seconds before a process that died is restarted. The pause doubles with each further death in a row."""
HEALTHY_SECONDS = 60.0
"""A process that has served for this many seconds is healthy: its earlier deaths no longer count."""
EXIT_NEWS_SECONDS = 3.0
HOST_SECONDS = 3.0
"""Seconds between two attempts to start a worker on a host that cannot be reached."""
MOVE_SECONDS = 15.0
"""Seconds after which a trainer whose host cannot be reached is started on another host. Engines wait for theirs."""
REASON_SECONDS = 0.2
"""The reason that a worker gives may arrive so many seconds after the news of its exit."""


@dataclass(frozen=True, kw_only=True)
class SeveralHosts:
    """What a fleet needs to know if its workers may be on other hosts than the controller."""

    hosts: Sequence[Host]
    """All hosts of the run. The first one is the controller's own."""
    address: str
    """The address at which the other hosts reach it."""
    silence: float
    """A worker that is silent for so many seconds is dead."""
    welcome: Callable[[Hub, str], Awaitable[None]]
    """Sends what a worker with this name starts from, if it has no run directory."""


class Fleet(Processes):
    """The workers of a run by name, and the hub that they talk to."""

    def __init__(
        self,
        launcher: Launcher,
        run_dir: Path,
        places: Sequence[Place],
        events: Events,
        restarts: Mapping[str, int] | None = None,
        hosts: SeveralHosts | None = None,
    ) -> None:
        """Make the hub, but start nothing. `places` has one for every worker.

        `restarts` says how often in a row each worker may be restarted. The death of a worker that it does not name
        ends the run. Without `hosts`, all workers are on this host.
        """
        self._launcher = launcher
        self._hosts = hosts
        self._events = events
        self._restarts = dict(restarts or {})
        sweep_socket_dirs()
        self._sockets = SocketDir()
        self.sockets = self._sockets.path
        """The directory of the run's sockets. Only this user can enter it, and it is gone after `stop`."""
        self._names = {place.name for place in places}
        address = f"ipc://{self._sockets.path}/hub" if hosts is None else f"tcp://{hosts.address}:*"
        silence = SILENCE_SECONDS if hosts is None else hosts.silence
        self.hub = Hub(address, self._dispatch, self._silent, self._message_dropped, names=self._names, silence=silence)
        self._meeting = Meeting(self.hub, [place.name for place in places if place.role == "trainer"])
        self._reasons: dict[str, str] = {}
        """The reasons why workers end, by worker: the one that it gave, or that its messages cannot be read."""
        self._run_dir = run_dir
        self._places = {place.name: place for place in places}
        self._reserved: dict[str, Place] = {}
        """Worker -> the place that the launcher has reserved for it. A worker that was removed keeps it."""
        self._gone: dict[str, asyncio.Event] = {}
        """Worker whose process runs -> the event that is set when its process has ended."""
        self._joining: dict[str, asyncio.Future[None]] = {}
        """Worker that was added and is not ready yet -> what `add` waits for."""
        self._leaving: set[str] = set()
        """The workers that end because they were removed."""
        self._epochs: Counter[str] = Counter()
        self._ready: dict[str, Ready] = {}
        self._stopping = False
        self._start_seconds = 0.0
        self._silenced: asyncio.Queue[tuple[PeerDied, int]] = asyncio.Queue()
        self._deaths: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._unheard: set[str] = set()
        """The workers on other hosts that fell silent, or said nothing yet: their hosts may be lost."""
        self._lost_since: dict[str, float] = {}
        """Worker -> since when its host is lost."""
        self._ready_since: dict[str, float] = {}
        self.restarting: set[str] = set()
        """The workers that died and have not rejoined yet. Each has a deadline."""
        self.phases: dict[str, str] = {}
        """Worker -> the phase that it last reported."""
        self._started = False

    def facts(self, name: str) -> dict[str, int | float | str]:
        """Return what a worker reported about itself when it became ready. Empty while the worker is not ready."""
        return self._ready[name].facts if name in self._ready else {}

    async def start(self, deadline: float) -> None:
        """Start every worker and wait until all are ready. Raises `DeadlineError` after `deadline` seconds.

        `watch` must run meanwhile, to notice a worker that dies.
        """
        self._start_seconds = deadline
        self.hub.start()
        self._log("").parent.mkdir(exist_ok=True)
        await self._reserve(list(self._places.values()))
        async with asyncio.TaskGroup() as tasks:
            for name in self._places:
                tasks.create_task(self._launch(name), name=f"start {name}")
        began = time.monotonic()
        while missing := [name for name in self._places if name not in self._ready]:
            if time.monotonic() - began > deadline:
                states = ", ".join(f"{name} ({self.phases.get(name, 'not heard of')})" for name in missing)
                raise DeadlineError(f"not ready within {deadline:g} s: {states}")
            await asyncio.sleep(0.02)
        self._started = True

    async def _launch(self, name: str) -> None:
        """Start a worker in a new epoch. From now on, an older process of this name is refused."""
        epoch = self._epochs[name]
        self._epochs[name] += 1
        self.hub.expect(name, epoch)
        self._gone[name] = asyncio.Event()
        place = self._places[name]
        spec = WorkerSpec(
            role=place.role,
            rank=place.rank,
            address=self.hub.address,
            run_dir=str(self._run_dir),
            away=self._is_away(name),
            host=place.host,
            epoch=epoch,
            own_address=place.address,
            server_key=self.hub.public_key,
            neighbours=place.neighbours,
            meet_at=place.meet_at,
            environment=place.environment,
        )
        if spec.away:
            self._unheard.add(name)
        if key := await self._launcher.start(spec):
            self.hub.expect(name, epoch, key)

    async def add(self, place: Place, restarts: int) -> None:
        """Start one more worker while the run is live, and wait until it is ready.

        Raises `UserError` if it does not become ready, because it cannot be reserved, died, took too long, or was
        removed meanwhile. Then `remove` must be called.
        """
        name = place.name
        self._names.add(name)
        self._restarts[name] = restarts
        self._places[name] = place
        ready = self._joining[name] = asyncio.get_running_loop().create_future()
        try:
            if self._reserved.get(name) != place:
                await self._reserve([place])
            if not ready.done():
                await self._launch(name)
            async with asyncio.timeout(self._start_seconds):
                await ready
        except TimeoutError as error:
            raise UserError(f"{name} was not ready within {self._start_seconds:g} s") from error
        finally:
            del self._joining[name]

    async def remove(self, name: str) -> None:
        """End one worker while the run is live, and wait until its process has ended. It is not restarted."""
        self._leaving.add(name)
        if (joining := self._joining.get(name)) is not None and not joining.done():
            joining.set_exception(UserError(f"{name} is not needed any more"))
        if (gone := self._gone.get(name)) is not None:
            with contextlib.suppress(ChannelError):
                await self.hub.send(name, Stop())
            if not await _happened(gone, STOP_SECONDS):
                self._launcher.kill(name)
                await _happened(gone, STOP_SECONDS)
        self._deaths[name] += 1  # What waits for this process, to restart it or to kill it, is void.
        self._leaving.discard(name)
        self.restarting.discard(name)
        for known in (self._places, self._restarts, self._ready, self._ready_since, self._lost_since, self.phases):
            known.pop(name, None)

    def _is_away(self, name: str) -> bool:
        """Return whether a worker is on another host than the controller."""
        return self._hosts is not None and self._places[name].host != self._hosts.hosts[0].name

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    async def watch(self) -> None:
        """Watch the workers, and restart those that may be restarted, until one ends the run.

        Raises an exception group. It holds `PeerDied` when a worker that may not be restarted dies or falls silent,
        `UserError` when a worker died of a user's mistake, and `DeadlineError` when a restarted worker is not ready in
        time. An error in one of the hub's tasks is in the group too.
        """
        async with asyncio.TaskGroup() as watchers:
            watchers.create_task(self.hub.failed(), name="watch the hub")
            watchers.create_task(self._watch_exits(watchers), name="watch exits")
            watchers.create_task(self._watch_silence(), name="watch silence")
            watchers.create_task(self._meeting.tell(), name="tell ranks where to meet")

    async def _watch_exits(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            exited = await self._next_exit()
            if (gone := self._gone.pop(exited.name, None)) is not None:
                gone.set()
            if self._stopping:
                continue
            if exited.name in self._leaving or exited.name not in self._places:
                self.hub.mark_dead(PeerDied(exited.name, "it was removed from the run"))
                continue
            if exited.code in (EXIT_USER_ERROR, EXIT_LOST) and exited.name not in self._reasons:
                await asyncio.sleep(REASON_SECONDS)
            lines = exited.last_lines
            if self._is_away(exited.name):
                lines = lines or log_end(self._log(exited.name))
            reason = self._reasons.pop(exited.name, "") or _last_line(exited.code, lines)
            death = PeerDied(exited.name, reason or _how(exited), lines)
            self._ready.pop(death.peer, None)
            self.hub.mark_dead(death)
            if (joining := self._joining.get(death.peer)) is not None and not joining.done():
                joining.set_exception(UserError(str(death)))
                continue
            # Popped, because a process that dies before it is ready has not served, however long its predecessor
            # served.
            if time.monotonic() - self._ready_since.pop(death.peer, time.monotonic()) > HEALTHY_SECONDS:
                self._in_a_row[death.peer] = 0
            mistake = exited.code == EXIT_USER_ERROR
            # A process that something kills while the run starts is restarted too. One that fails by itself would fail
            # again, and its reason should be told at once.
            allowed = self._restarts.get(death.peer, 0) if self._started or exited.code < 0 else 0
            last = self._in_a_row[death.peer] >= allowed
            if last or (mistake and death.peer not in self.restarting):
                self._events.put(Died(death, restarts=False))
                if mistake:
                    raise UserError(reason or str(death))
                raise death
            self._events.put(Died(death, restarts=True))
            self._deaths[death.peer] += 1
            if death.peer in self._unheard:
                self._lost_since.setdefault(death.peer, time.monotonic())
            else:
                self._in_a_row[death.peer] += 1
            self.restarting.add(death.peer)
            tasks.create_task(self._restart(death), name=f"restart {death.peer}")

    async def _next_exit(self) -> Exit:
        """Wait for the next process that ends, and return its exit.

        The death of any trainer rank ends the run, and the other ranks may die of it. So for a trainer rank this waits
        a little for another rank's exit that can be the cause, and returns that one if it comes.
        """
        exited = await self._launcher.next_exit()
        ranks = [name for name, place in self._places.items() if place.role == "trainer"]
        if self._stopping or len(ranks) == 1 or exited.name not in ranks or not _may_follow(exited):
            return exited
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_NEWS_SECONDS):
                while True:
                    other = await self._launcher.next_exit()
                    if other.name in ranks and not _may_follow(other):
                        return other
        return exited

    async def _restart(self, death: PeerDied) -> None:
        lost, deaths = death.peer in self._lost_since, self._deaths[death.peer]
        await asyncio.sleep(HOST_SECONDS if lost else FIRST_PAUSE * 2 ** (self._in_a_row[death.peer] - 1))
        if self._stopping or self._deaths[death.peer] != deaths:
            return
        in_start = not self._started
        if lost:
            await self._wait_or_move(death)
        await self._launch(death.peer)
        began = time.monotonic()
        while death.peer not in self._ready:
            if self._deaths[death.peer] != deaths or self._stopping:
                return  # It has died again; another restart takes care of it.
            if time.monotonic() - began > self._start_seconds:
                raise DeadlineError(f"{death.peer}, started again, was not ready within {self._start_seconds:g} s")
            await asyncio.sleep(0.02)
        self._lost_since.pop(death.peer, None)
        if in_start:
            self.restarting.discard(death.peer)  # `start` waits for it, and nobody has missed it yet.
        else:
            self._events.put(Returned(death.peer, self.facts(death.peer)))

    async def _wait_or_move(self, death: PeerDied) -> None:
        """Say that a worker waits for its host. Move a trainer that has waited too long, if there is room."""
        name, place = death.peer, self._places[death.peer]
        waited = time.monotonic() - self._lost_since[name]
        if waited < 2 * HOST_SECONDS:
            self._events.put(Awaited(name, f"{place.host}: {death.reason}"))
        if self._hosts is None or place.role != "trainer" or waited < MOVE_SECONDS:
            return
        others = [other for other in self._places.values() if other.name != name]
        if (moved := move(place, others, self._hosts.hosts)) is not None:
            self._places[name] = moved
            self._lost_since[name] = time.monotonic()
            await self._reserve([moved])
            self._events.put(Awaited(name, f"{place.host} is lost; it is started on {moved.host}"))

    async def _reserve(self, places: Sequence[Place]) -> None:
        if isinstance(self._launcher, ClusterLauncher):
            await self._launcher.hosts()
            await self._launcher.reserve(places)
        self._reserved |= {place.name: place for place in places}

    def rejoined(self, name: str) -> None:
        """Report that a restarted worker does its work again. After that, a user's mistake in it ends the run."""
        if name in self._ready:
            self.restarting.discard(name)

    def kill(self, name: str) -> None:
        """Kill a worker that does not do its work. It is then restarted like any worker that died.

        The worker first gets a few seconds to end by itself: one that reported an error may be about to, and only its
        own exit code says whether the error was a user's mistake.
        """
        deaths = self._deaths[name]

        def kill() -> None:
            if self._deaths[name] == deaths and not self._stopping:
                self._launcher.kill(name)

        asyncio.get_running_loop().call_later(EXIT_NEWS_SECONDS, kill)

    async def _watch_silence(self) -> None:
        while True:
            death, deaths = await self._silenced.get()
            if self._deaths[death.peer] != deaths or death.peer in self._leaving:
                continue
            if death.peer in self.hub.peers:
                # It cannot be reached, but was heard a moment ago: it may have just ended. Its launcher knows how it
                # ended and should report first.
                await asyncio.sleep(EXIT_NEWS_SECONDS)
            if self._deaths[death.peer] != deaths or not self.hub.lost(death.peer):
                continue
            if self._started and self._restarts.get(death.peer, 0):
                if self._is_away(death.peer):
                    self._unheard.add(death.peer)
                self._reasons.setdefault(death.peer, death.reason)
                self._launcher.kill(death.peer)  # The exit event causes the restart.
                continue
            self.hub.mark_dead(death)
            self._events.put(Died(death, restarts=False))
            raise death

    async def _welcome(self, hosts: SeveralHosts, peer: str) -> None:
        with contextlib.suppress(PeerDied):  # It is started again, and is then welcomed again.
            await hosts.welcome(self.hub, peer)

    def _silent(self, death: PeerDied) -> None:
        if not self._stopping:
            self._silenced.put_nowait((death, self._deaths[death.peer]))

    def _message_dropped(self, peer: str, reason: str, refused: bool) -> None:
        self._events.put(Dropped(peer, reason))
        if refused and not self._stopping:
            self._reasons[peer] = f"its messages cannot be read: {reason}"
            self._launcher.kill(peer)

    async def stop(self, grace: float = STOP_SECONDS) -> None:
        """Ask every worker to end, and kill those that do not within `grace` seconds. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for peer in self.hub.peers:
                try:
                    await self.hub.send(peer, Stop())
                except ChannelError:
                    continue  # It is gone already, which is what we want.
        await self._launcher.stop(grace)
        await self.hub.close()
        self._sockets.remove()

    def _dispatch(self, peer: str, message: Message) -> None:
        match message:
            case Heartbeat():
                self.phases[peer] = message.phase
                self._events.put(Heard(peer, message))
            case Ready():
                self._ready[peer] = message
                self._ready_since[peer] = time.monotonic()
                if (joining := self._joining.get(peer)) is not None and not joining.done():
                    joining.set_result(None)
            case FailureReason(reason=reason):
                self._reasons[peer] = reason
            case LogText(text=text):
                with self._log(peer).open("a") as log:
                    log.write(text)
            case Hello(without_files=without_files):
                self._unheard.discard(peer)
                self._reasons.pop(peer, None)
                self.hub.forget(peer)
                self.phases[peer] = "starting"
                self._meeting.heard(peer, message)
                if without_files and self._hosts is not None:
                    self.hub.watch(asyncio.create_task(self._welcome(self._hosts, peer), name=f"welcome {peer}"))
            case MeetingPoint() | MeetingRequest():
                self._meeting.heard(peer, message)
            case _:
                self._events.put(Heard(peer, message))


async def _happened(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so many seconds. Return whether it happened."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def _may_follow(exited: Exit) -> bool:
    """Return whether a process ended with an error that the end of another process may have caused."""
    return exited.code > 0 and exited.code != EXIT_USER_ERROR


def _last_line(code: int, lines: str) -> str:
    """Return the reason why a worker ended from the last line of its log, if its exit code says that it is there."""
    told = code in (EXIT_USER_ERROR, EXIT_LOST) and lines
    return lines.splitlines()[-1] if told else ""


def _how(exited: Exit) -> str:
    return f"killed by signal {-exited.code}" if exited.code < 0 else f"exit code {exited.code}"
