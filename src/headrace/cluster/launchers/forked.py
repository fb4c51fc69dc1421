"""Workers as forks of a process that has loaded their libraries: they start and restart in a moment.

The first start loads the libraries, once for all workers of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.launchers.fork_server import Kill, Start, WorkerEnded
from headrace.cluster.launchers.fork_server_connection import ForkServerConnection
from headrace.cluster.launchers.worker_log import last_lines, worker_log

KILL_SECONDS = 5.0


class ForkedLauncher:
    """A `Launcher` that forks workers from a fork server."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Make a launcher; `environment` is added to that of every worker."""
        self._environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        self._logs: dict[str, Path] = {}
        """Worker -> its log file, for workers that run or have been requested."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._server: ForkServerConnection | None = None
        self._opening = asyncio.Lock()

    async def start(self, spec: WorkerSpec) -> None:
        """See `Launcher.start`."""
        log = worker_log(spec)
        # Workers that died with their fork server are restarted at the same time, from one new fork server.
        async with self._opening:
            if self._server is None:
                self._server = await ForkServerConnection.open(
                    log.parent / "fork_server.log", self._environment, self._ended, self._lost
                )
        self._logs[spec.name] = log
        self._idle.clear()
        self._server.send(
            Start(
                name=spec.name,
                arguments=spec.arguments,
                environment=self._environment,
                directory=str(Path.cwd()),
                log=str(log),
            )
        )

    async def next_exit(self) -> Exit:
        """See `Launcher.next_exit`."""
        return await self._exits.get()

    def kill(self, name: str) -> None:
        """See `Launcher.kill`."""
        if self._server is not None and name in self._logs:
            self._server.send(Kill(name=name))

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`."""
        await self._all_ended(grace)
        for name in list(self._logs):
            self.kill(name)
        await self._all_ended(KILL_SECONDS)
        if self._server is not None:
            await self._server.close()
            self._server = None

    async def _all_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    def _ended(self, ended: WorkerEnded) -> None:
        self._gone(ended.name, ended.code)

    def _lost(self, code: int, lines: str) -> None:
        """Report all workers as ended, because the fork server has ended and its workers with it."""
        self._server = None
        for name in list(self._logs):
            self._gone(name, code, lines)

    def _gone(self, name: str, code: int, lines: str = "") -> None:
        log = self._logs.pop(name)
        self._exits.put_nowait(Exit(name=name, code=code, last_lines=lines or last_lines(log)))
        if not self._logs:
            self._idle.set()
