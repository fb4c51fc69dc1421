"""A launcher's connection to a fork server: its own one, or a shared one that `HEADRACE_FORK_SERVER` names.

The launcher's own fork server ends with the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.cluster.launchers.fork_server import ROOM, Kill, Start, WorkerEnded
from headrace.cluster.launchers.worker_log import last_lines
from headrace.cluster.socket_dir import SocketDir
from headrace.errors import DeadlineError

SHARED = "HEADRACE_FORK_SERVER"
LISTEN_SECONDS = 30.0
"""Seconds in which a new fork server must listen. It listens before it loads anything."""
LEAVE_SECONDS = 5.0
"""Seconds that a fork server which closed its connection has to exit, so that its exit code tells why."""


class ForkServerConnection:
    """An open connection. `ended` is called for each worker that ends.

    `lost` is called when the connection ends unexpectedly; all workers have then ended too.
    """

    def __init__(
        self,
        log: Path,
        process: Process | None,
        sockets: SocketDir | None,
        ended: Callable[[WorkerEnded], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """Store the parts of a connection. Callers use `open` instead."""
        self._log, self._process, self._sockets = log, process, sockets
        self._ended, self._lost = ended, lost
        self._closing = False

    @classmethod
    async def open(
        cls,
        log: Path,
        environment: Mapping[str, str],
        ended: Callable[[WorkerEnded], None],
        lost: Callable[[int, str], None],
    ) -> ForkServerConnection:
        """Connect to the shared fork server, or to a new one if none is shared. The server may still be loading."""
        if shared := os.environ.get(SHARED):
            line = cls(log, None, None, ended, lost)
            await line._connect(shared)
            return line
        sockets = SocketDir()
        path = str(sockets.path / "fork")
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.cluster.launchers.fork_server", path, " " * ROOM),
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**environment, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        line = cls(log, process, sockets, ended, lost)
        await line._connect(path)
        return line

    async def _connect(self, path: str) -> None:
        began = time.monotonic()
        while True:
            try:
                self._reader, self._writer = await asyncio.open_unix_connection(path)
                break
            except OSError as error:
                gone = self._process is not None and self._process.returncode is not None
                if gone or time.monotonic() - began > LISTEN_SECONDS:
                    await self._end()
                    why = f"{error}; see {self._log}"
                    raise DeadlineError(f"no process to fork workers from at {path}: {why}") from None
                await asyncio.sleep(0.01)
        self._listener = asyncio.create_task(self._listen(), name="listen to the fork server")

    def send(self, message: Start | Kill) -> None:
        """Send a command. The fork server carries it out as soon as it has loaded its libraries."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while line := await self._reader.readline():
                self._ended(msgspec.json.decode(line, type=WorkerEnded))
        self._writer.close()
        if not self._closing:
            code = await self._end(grace=LEAVE_SECONDS)
            self._lost(code, last_lines(self._log) if code > 0 else "")

    async def close(self) -> None:
        """Close the connection. Workers that still run end with it."""
        self._closing = True
        self._writer.close()
        self._listener.cancel()
        await asyncio.wait([self._listener])
        await self._end()

    async def _end(self, grace: float = 0.0) -> int:
        """Make sure that the launcher's own fork server has ended, and return its exit code."""
        code = -signal.SIGKILL
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            code = await self._process.wait()
        if self._sockets is not None:
            self._sockets.remove()
        return code
