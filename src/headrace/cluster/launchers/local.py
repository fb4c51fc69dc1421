"""Workers on this host. `LocalLauncher` starts each with its own interpreter, `ForkedLauncher` forks them.

`make_launcher` chooses: workers are forked where that is safe, and started one by one elsewhere. All starts of one
worker write to one log, `logs/<name>.log` in the run directory.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.cluster.launchers.base import Exit, Launcher, WorkerSpec
from headrace.cluster.launchers.fork_server import ROOM, Kill, Start, WorkerEnded
from headrace.config import Config
from headrace.errors import ConfigError, one_line
from headrace.reference import call_factory, import_function

LAST_LINES = 12
LAST_BYTES = 1 << 16
KILL_SECONDS = 30.0
"""Seconds to wait until a killed process is gone. On a machine with much else to do, that may take a while."""
SHARED = "HEADRACE_FORK_SERVER"
"""This variable names the socket of a process that gives every launcher a loaded fork server."""
LEAVE_SECONDS = 5.0
"""Seconds that a fork server which closed its connection has to exit, so that its exit code tells why."""
GPU_DRIVER = Path("/dev/nvidiactl")


class _HostLauncher:
    """What both launchers share: the environment and the logs of their workers, and the queue of exits."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Make a launcher; `environment` is added to that of every worker."""
        self._environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        self._logs: dict[str, tuple[Path, int]] = {}
        """Worker -> its log, and how many bytes of it are of earlier starts."""
        self._exits: asyncio.Queue[Exit | BaseException] = asyncio.Queue()

    async def next_exit(self) -> Exit:
        """See `Launcher.next_exit`. Raises the error of a task that watches workers, because it would miss an exit."""
        found = await self._exits.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _own(self, watcher: asyncio.Task[None]) -> asyncio.Task[None]:
        """Have `next_exit` raise the error that ends this task, if one does."""

        def ended(watcher: asyncio.Task[None]) -> None:
            if not watcher.cancelled() and (error := watcher.exception()) is not None:
                self._exits.put_nowait(error)

        watcher.add_done_callback(ended)
        return watcher

    def _log(self, spec: WorkerSpec) -> Path:
        logs = Path(spec.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{spec.name}.log"

    def _report(self, name: str, code: int, lines: str = "") -> None:
        self._exits.put_nowait(Exit(name=name, code=code, last_lines=lines or _last_lines(*self._logs[name])))


class LocalLauncher(_HostLauncher):
    """A `Launcher` that starts workers as subprocesses."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(environment)
        self._processes: dict[str, Process] = {}
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, spec: WorkerSpec) -> None:
        """See `Launcher.start`."""
        log = self._log(spec)
        self._logs[spec.name] = log, _size(log)
        command = [sys.executable, "-m", "headrace.cluster.worker_main", *spec.arguments]
        process = await _spawn(command, log, {**self._environment, **spec.environment, "PYTHONUNBUFFERED": "1"})
        self._processes[spec.name] = process
        watcher = asyncio.create_task(self._watch(spec.name, process), name=f"watch {spec.name}")
        self._watchers.append(self._own(watcher))

    def kill(self, name: str) -> None:
        """See `Launcher.kill`."""
        process = self._processes[name]
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=grace)
            for name in self._processes:
                self.kill(name)
            await asyncio.wait(self._watchers, timeout=KILL_SECONDS)
        self._watchers = []

    async def _watch(self, name: str, process: Process) -> None:
        self._report(name, await process.wait())


class ForkedLauncher(_HostLauncher):
    """A `Launcher` that forks workers from a fork server, so that they start and restart in a moment.

    The fork server loads the workers' libraries at the first start, once for all workers of the run. It ends with this
    launcher.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(environment)
        # `_logs` has the workers that run or have been requested. `_idle` is set while there are none.
        self._idle = asyncio.Event()
        self._idle.set()
        self._opening = asyncio.Lock()
        self._server: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._process: Process | None = None

    async def start(self, spec: WorkerSpec) -> None:
        """See `Launcher.start`."""
        log = self._log(spec)
        # Workers that died with their fork server are restarted at the same time, from one new fork server.
        async with self._opening:
            if self._server is None:
                await self._connect(log.parent / "fork_server.log")
        self._logs[spec.name] = log, _size(log)
        self._idle.clear()
        self._send(
            Start(
                name=spec.name,
                arguments=spec.arguments,
                environment={**self._environment, **spec.environment},
                directory=str(Path.cwd()),
                log=str(log),
            )
        )

    def kill(self, name: str) -> None:
        """See `Launcher.kill`."""
        if name in self._logs:
            self._send(Kill(name=name))

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        await self._all_ended(grace)
        for name in self._logs:
            self.kill(name)
        await self._all_ended(KILL_SECONDS)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        await self._end_server()

    async def _connect(self, log: Path) -> None:
        """Start a fork server, which may load its libraries for a while, or connect to a loaded one."""
        if shared := os.environ.get(SHARED):
            reader, self._server = await asyncio.open_unix_connection(shared)
        else:
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "headrace.cluster.launchers.fork_server", " " * ROOM]
            environment = {**self._environment, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"}
            with theirs:
                self._process = await _spawn(command, log, environment, theirs.fileno())
            reader, self._server = await asyncio.open_unix_connection(sock=ours)
        self._listener = self._own(asyncio.create_task(self._listen(reader, log), name="listen to the fork server"))

    def _send(self, message: Start | Kill) -> None:
        """Send a command. The fork server carries it out as soon as it has loaded its libraries."""
        if self._server is not None and not self._server.is_closing():
            self._server.write(msgspec.json.encode(message) + b"\n")

    async def _listen(self, reader: asyncio.StreamReader, log: Path) -> None:
        """Report workers that end. When the connection ends, the fork server has ended, and all workers with it."""
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                ended = msgspec.json.decode(line, type=WorkerEnded)
                self._ended(ended.name, ended.code)
        code = await self._end_server(LEAVE_SECONDS)
        lines = _last_lines(log) if code > 0 else ""
        for name in list(self._logs):
            self._ended(name, code, lines)

    def _ended(self, name: str, code: int, lines: str = "") -> None:
        self._report(name, code, lines)
        del self._logs[name]
        if not self._logs:
            self._idle.set()

    async def _all_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def _end_server(self, grace: float = 0.0) -> int:
        """Close the connection, which ends all workers, and end the launcher's own fork server.

        Returns the exit code of that fork server.
        """
        code = -signal.SIGKILL
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
        self._server = self._process = None
        return code


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Launcher]] = {"local": LocalLauncher, "forked": ForkedLauncher}
"""The built-in launchers, by their names in `[pipeline] launcher`."""


def make_launcher(config: Config, environment: Mapping[str, str] | None = None) -> Launcher:
    """Make the launcher that `[pipeline] launcher` names. `environment` is added to that of every worker."""
    name = config.pipeline.launcher
    if name == "auto":
        name = "forked" if _forks_are_safe(config) else "local"
    if name in LAUNCHERS:
        return LAUNCHERS[name](environment or {})
    made: Launcher = call_factory(f"[pipeline] launcher: {name}", import_function(name), environment or {})
    for method in ("start", "next_exit", "kill", "stop"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"[pipeline] launcher: {name} made a {type(made).__name__} without {method!r}")
    return made


def _forks_are_safe(config: Config) -> bool:
    """Return whether workers may be forked on this system.

    A library that initializes a GPU while it is loaded could break that GPU for every fork. On macOS, the system's own
    libraries are not safe to fork.
    """
    on_cpu = {config.engine.device, config.training.device} == {"cpu"} or not GPU_DRIVER.exists()
    return sys.platform == "linux" and on_cpu


async def _spawn(command: list[str], log: Path, environment: Mapping[str, str], stdin: int = DEVNULL) -> Process:
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=output, stderr=output, start_new_session=True, env=environment
        )


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def _last_lines(log: Path, start: int = 0) -> str:
    """Return the last lines of a log, of those after its first `start` bytes."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LAST_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(one_line(line) for line in text.strip().splitlines()[-LAST_LINES:])
