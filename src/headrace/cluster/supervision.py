"""Supervision starts the worker processes of a run, waits until they are ready, watches them, and ends them.

Messages from workers and news of their deaths go to one queue of events. A process that dies is restarted where that is
allowed, each time after a longer pause and a limited number of times. Otherwise its death ends the run, with its last
lines of output: so does that of a process which fails by itself while the run starts. A run that ends leaves no process
behind.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.channel.codec import Message
from headrace.channel.events import Died, Dropped, Events, Heard, Returned
from headrace.channel.heartbeats import FailureReason, Heartbeat, Hello, Ready, Stop
from headrace.channel.hub import Hub
from headrace.channel.vital import EXIT_LOST
from headrace.cluster.base import EXIT_USER_ERROR, Processes
from headrace.cluster.launchers.base import Exit, Launcher, WorkerSpec
from headrace.cluster.placement import Place
from headrace.cluster.socket_dir import SocketDir, sweep_socket_dirs
from headrace.errors import ChannelError, DeadlineError, PeerDied, UserError

STOP_SECONDS = 10.0
FIRST_PAUSE = 0.5
"""Seconds before a process that died is restarted. The pause doubles with each further death in a row."""
HEALTHY_SECONDS = 60.0
"""A process that has served for this many seconds is healthy: its earlier deaths no longer count."""
EXIT_NEWS_SECONDS = 3.0
REASON_SECONDS = 0.2
"""The reason that a worker gives may arrive so many seconds after the news of its exit."""


class Fleet(Processes):
    """The workers of a run by name, and the hub that they talk to."""

    def __init__(
        self,
        launcher: Launcher,
        run_dir: Path,
        places: Sequence[Place],
        events: Events,
        restarts: Mapping[str, int] | None = None,
    ) -> None:
        """Make the hub, but start nothing. `places` has one for every worker.

        `restarts` says how often in a row each worker may be restarted. The death of a worker that it does not name
        ends the run.
        """
        self._launcher = launcher
        self._events = events
        self._restarts = dict(restarts or {})
        sweep_socket_dirs()
        self._sockets = SocketDir()
        names = {place.name for place in places}
        address = f"ipc://{self._sockets.path}/hub"
        self.hub = Hub(address, self._dispatch, self._silent, self._message_dropped, names=names)
        self._reasons: dict[str, str] = {}
        """The reasons why workers end, by worker: the one that it gave, or that its messages cannot be read."""
        self._specs = [
            WorkerSpec(
                role=place.role,
                rank=place.rank,
                address=self.hub.address,
                run_dir=str(run_dir),
                neighbours=place.neighbours,
                environment=place.environment,
            )
            for place in places
        ]
        self._ready: dict[str, Ready] = {}
        self._stopping = False
        self._start_seconds = 0.0
        self._silenced: asyncio.Queue[tuple[PeerDied, int]] = asyncio.Queue()
        self._deaths: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
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
        for spec in self._specs:
            await self._launcher.start(spec)
        began = time.monotonic()
        while missing := [spec.name for spec in self._specs if spec.name not in self._ready]:
            if time.monotonic() - began > deadline:
                states = ", ".join(f"{name} ({self.phases.get(name, 'not heard of')})" for name in missing)
                raise DeadlineError(f"not ready within {deadline:g} s: {states}")
            await asyncio.sleep(0.02)
        self._started = True

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

    async def _watch_exits(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            exited = await self._next_exit()
            if self._stopping:
                continue
            if exited.code in (EXIT_USER_ERROR, EXIT_LOST) and exited.name not in self._reasons:
                await asyncio.sleep(REASON_SECONDS)
            reason = self._reasons.pop(exited.name, "") or _last_line(exited)
            death = PeerDied(exited.name, reason or _how(exited), exited.last_lines)
            self._ready.pop(death.peer, None)
            self.hub.mark_dead(death)
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
            self._in_a_row[death.peer] += 1
            self.restarting.add(death.peer)
            tasks.create_task(self._restart(death), name=f"restart {death.peer}")

    async def _next_exit(self) -> Exit:
        """Wait for the next process that ends, and return its exit.

        The death of any trainer rank ends the run, and the other ranks may die of it. So for a trainer rank this waits
        a little for another rank's exit that can be the cause, and returns that one if it comes.
        """
        exited = await self._launcher.next_exit()
        ranks = [spec.name for spec in self._specs if spec.role == "trainer"]
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
        await asyncio.sleep(FIRST_PAUSE * 2 ** (self._in_a_row[death.peer] - 1))
        if self._stopping:
            return
        deaths, in_start = self._deaths[death.peer], not self._started
        await self._launcher.start(next(spec for spec in self._specs if spec.name == death.peer))
        began = time.monotonic()
        while death.peer not in self._ready:
            if self._deaths[death.peer] != deaths or self._stopping:
                return  # It has died again; another restart takes care of it.
            if time.monotonic() - began > self._start_seconds:
                raise DeadlineError(f"{death.peer}, started again, was not ready within {self._start_seconds:g} s")
            await asyncio.sleep(0.02)
        if in_start:
            self.restarting.discard(death.peer)  # `start` waits for it, and nobody has missed it yet.
        else:
            self._events.put(Returned(death.peer, self.facts(death.peer)))

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
            if self._deaths[death.peer] != deaths:
                continue
            # A process that has just ended cannot be reached either. Its launcher knows how it ended and should report
            # first.
            await asyncio.sleep(EXIT_NEWS_SECONDS)
            if self._deaths[death.peer] != deaths or not self.hub.lost(death.peer):
                continue
            if self._started and self._restarts.get(death.peer, 0):
                self._launcher.kill(death.peer)  # The exit event causes the restart.
                continue
            self.hub.mark_dead(death)
            self._events.put(Died(death, restarts=False))
            raise death

    def _silent(self, death: PeerDied) -> None:
        if not self._stopping:
            self._silenced.put_nowait((death, self._deaths[death.peer]))

    def _message_dropped(self, peer: str, reason: str, refused: bool) -> None:
        self._events.put(Dropped(peer, reason))
        if refused and not self._stopping:
            self._reasons[peer] = f"its messages cannot be read: {reason}"
            self._launcher.kill(peer)

    async def stop(self) -> None:
        """Ask every worker to end, and kill those that do not. Idempotent."""
        if not self._stopping:
            self._stopping = True
            for peer in self.hub.peers:
                try:
                    await self.hub.send(peer, Stop())
                except ChannelError:
                    continue  # It is gone already, which is what we want.
        await self._launcher.stop(STOP_SECONDS)
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
            case FailureReason(reason=reason):
                self._reasons[peer] = reason
            case Hello():
                self._reasons.pop(peer, None)
                self.hub.forget(peer)
                self.phases[peer] = "starting"
            case _:
                self._events.put(Heard(peer, message))


def _may_follow(exited: Exit) -> bool:
    """Return whether a process ended with an error that the end of another process may have caused."""
    return exited.code > 0 and exited.code != EXIT_USER_ERROR


def _last_line(exited: Exit) -> str:
    """Return the reason why a worker ended from the last line of its log, if its exit code says that it is there."""
    told = exited.code in (EXIT_USER_ERROR, EXIT_LOST) and exited.last_lines
    return exited.last_lines.splitlines()[-1] if told else ""


def _how(exited: Exit) -> str:
    return f"killed by signal {-exited.code}" if exited.code < 0 else f"exit code {exited.code}"
