"""The launcher protocol: start worker processes somewhere, say when one is gone, end them all.

What `[pipeline] launcher = "my_launcher.py:attribute"` names is called with the environment variables that every worker
must get in addition, and returns a `Launcher`. The smallest one changes a little about a built-in one:

    from headrace.cluster.launchers.local import LocalLauncher

    class Announced(LocalLauncher):
        async def start(self, spec):
            print("starting", spec.name)
            await super().start(spec)

A launcher of another kind starts `python -m headrace.cluster.worker_main` with `spec.arguments`, wherever it likes.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process: everything it starts from."""

    role: str
    rank: int
    address: str
    run_dir: str

    @property
    def name(self) -> str:
        """`engine-0`, `trainer-0`, ..."""
        return f"{self.role}-{self.rank}"

    @property
    def arguments(self) -> list[str]:
        """Those of `headrace.cluster.worker_main`."""
        own = {"--role": self.role, "--rank": str(self.rank), "--address": self.address, "--run": self.run_dir}
        return [word for pair in own.items() for word in pair]


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended."""

    name: str
    code: int
    last_lines: str


class Launcher(Protocol):
    """Starts and ends workers."""

    async def start(self, spec: WorkerSpec) -> None:
        """Start one worker; returns at once."""
        ...

    async def next_exit(self) -> Exit:
        """Wait for the next worker that ends; whoever calls this owns the wait."""
        ...

    def kill(self, name: str) -> None:
        """End this worker at once, if it still runs; `next_exit` tells when it is gone."""
        ...

    async def stop(self, grace: float) -> None:
        """End every worker: those that do not end by themselves within `grace` seconds are killed. Idempotent."""
        ...
