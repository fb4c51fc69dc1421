"""Workers as processes on this host, each with its own interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.launchers.worker_log import last_lines, worker_log


class LocalLauncher:
    """A `Launcher` that starts workers as subprocesses."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Make a launcher; `environment` is added to that of every worker."""
        self._environment = dict(environment or {})
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._logs: dict[str, Path] = {}
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self, spec: WorkerSpec) -> None:
        """See `Launcher.start`."""
        log = self._logs[spec.name] = worker_log(spec)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "headrace.cluster.worker_main", *spec.arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1", **self._environment},
            )
        self._processes[spec.name] = process
        self._watchers.append(asyncio.create_task(self._watch(spec.name, process), name=f"watch {spec.name}"))

    async def next_exit(self) -> Exit:
        """See `Launcher.next_exit`."""
        return await self._exits.get()

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
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=5.0)
        self._watchers = []

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._exits.put_nowait(Exit(name=name, code=code, last_lines=last_lines(self._logs[name])))
