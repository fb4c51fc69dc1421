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
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from headrace.cluster.base import KEY_LINE
from headrace.cluster.inventory import this_host
from headrace.cluster.launchers.base import Exit, Launcher, WorkerSpec
from headrace.cluster.launchers.exits import ExitQueue, log_end
from headrace.cluster.launchers.fork_server import ROOM, Kill, Start, WorkerEnded
from headrace.cluster.launchers.ray import RayLauncher
from headrace.cluster.placement import Host
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.reference import call_factory, import_function

KILL_SECONDS = 30.0
"""Seconds to wait until a killed process is gone. On a machine with much else to do, that may take a while."""
SHARED = "HEADRACE_FORK_SERVER"
"""This variable names the socket of a process that gives every launcher a loaded fork server."""
AT_ONCE_SECONDS = 0.3
LEAVE_SECONDS = 5.0
"""Seconds that a fork server which closed its connection has to exit, so that its exit code tells why."""
GPU_DRIVER = Path("/dev/nvidiactl")


class _HostLauncher(ExitQueue):
    """What both launchers share: the environment and the logs of their workers, and the queue of exits."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Make a launcher; `environment` is added to that of every worker."""
        super().__init__()
        self._environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        self._logs: dict[str, tuple[Path, int]] = {}
        """Worker -> its log, and how many bytes of it are of earlier starts."""

    async def hosts(self) -> list[Host]:
        """Return this host alone."""
        return [this_host()]

    def _log(self, spec: WorkerSpec) -> Path:
        logs = Path(spec.run_dir) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        return logs / f"{spec.name}.log"

    def _report(self, name: str, code: int, lines: str = "") -> None:
        self._exits.put_nowait(Exit(name=name, code=code, last_lines=lines or log_end(*self._logs[name])))


class LocalLauncher(_HostLauncher):
    """A `Launcher` that starts workers as subprocesses."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__(environment)
        self._processes: dict[str, Process] = {}
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, spec: WorkerSpec) -> str:
        """See `Launcher.start`."""
        log = self._log(spec)
        self._logs[spec.name] = log, _size(log)
        environment = {**self._environment, **spec.environment, "PYTHONUNBUFFERED": "1"}
        process = await _spawn(self.command(spec), log, environment, keyed=bool(spec.server_key))
        self._processes[spec.name] = process
        watcher = asyncio.create_task(self._watch(spec.name, process), name=f"watch {spec.name}")
        self._watchers.append(self._own(watcher))
        # A worker that dies before it prints its key is reported like any other.
        line = await process.stdout.readline() if process.stdout is not None else b""
        return line.decode().removeprefix(KEY_LINE).strip()

    def command(self, spec: WorkerSpec) -> list[str]:
        """Return the command that starts a worker."""
        return [sys.executable, "-m", "headrace.cluster.worker_main", *spec.arguments]

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

    async def start(self, spec: WorkerSpec) -> str:
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
        return ""

    def kill(self, name: str) -> None:
        """See `Launcher.kill`."""
        if name in self._logs:
            self._send(Kill(name=name))

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        await self._all_ended(grace)
        for name in self._logs:
            self.kill(name)
        # Without grace, nobody waits for a fork server that is still loading: its workers end with it.
        await self._all_ended(KILL_SECONDS if grace else 0.0)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])
        # One that has loaded kills its workers when the connection ends, which takes a moment.
        await self._end_server(0.0 if grace else AT_ONCE_SECONDS)

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
        lines = log_end(log) if code > 0 else ""
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
    if name == "ray":
        return RayLauncher(config, environment)
    try:
        factory = import_function(name)
    except ConfigError as error:
        raise ConfigError(f"[pipeline] launcher: {error}") from error
    made: Launcher = call_factory(f"[pipeline] launcher: {name}", factory, environment or {})
    for method in ("hosts", "start", "next_exit", "kill", "stop"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"[pipeline] launcher: {name} made a {type(made).__name__} without {method!r}")
    return made


def hosts_of(config: Config) -> list[Host]:
    """Return the hosts that a run may use, the controller's own first. A host of several has an address."""

    async def ask() -> list[Host]:
        launcher = make_launcher(config)
        try:
            return await launcher.hosts()
        finally:
            await launcher.stop(0.0)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(ask())
    # In a notebook, an event loop runs in this thread already.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask()).result()


def _forks_are_safe(config: Config) -> bool:
    """Return whether workers may be forked on this system.

    A library that initializes a GPU while it is loaded could break that GPU for every fork. On macOS, the system's own
    libraries are not safe to fork.
    """
    on_cpu = {config.engine.device, config.training.device} == {"cpu"} or not GPU_DRIVER.exists()
    return sys.platform == "linux" and on_cpu


async def _spawn(
    command: list[str], log: Path, environment: Mapping[str, str], stdin: int = DEVNULL, *, keyed: bool = False
) -> Process:
    """Start a process that writes to a log; if `keyed`, its standard output is a pipe instead."""
    with log.open("ab") as output:
        stdout = PIPE if keyed else output
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=stdout, stderr=output, start_new_session=True, env=environment
        )


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0
