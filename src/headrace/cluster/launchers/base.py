"""The launcher protocol: start worker processes somewhere, report when one has ended, end them all.

`[pipeline] launcher = "my_launcher.py:attribute"` names a callable. It is called with the environment variables that
every worker must get in addition, and returns a `Launcher`. The smallest example changes a little in a built-in
launcher:

    from headrace.cluster.launchers.local import LocalLauncher

    class Announced(LocalLauncher):
        async def start(self, spec):
            print("starting", spec.name)
            await super().start(spec)

A launcher of another kind starts `python -m headrace.cluster.worker_main` with `spec.arguments` and the variables of
`spec.environment` on any host.
"""

from typing import Protocol

import msgspec


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one worker process: everything that it starts from."""

    role: str
    rank: int
    address: str
    run_dir: str
    neighbours: tuple[str, ...] = ()
    """The names of the workers that share its GPU."""
    environment: dict[str, str] = {}
    """The environment variables of this worker alone: those that show it its GPUs."""

    @property
    def name(self) -> str:
        """The worker's name: `engine-0`, `trainer-0`, ..."""
        return f"{self.role}-{self.rank}"

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments for `headrace.cluster.worker_main`."""
        own = {"--role": self.role, "--rank": str(self.rank), "--address": self.address, "--run": self.run_dir}
        own |= {"--neighbours": ",".join(self.neighbours)} if self.neighbours else {}
        return [word for pair in own.items() for word in pair]


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: its exit code (negative for a signal) and the last lines of its log."""

    name: str
    code: int
    last_lines: str


class Launcher(Protocol):
    """A launcher starts and ends workers."""

    async def start(self, spec: WorkerSpec) -> None:
        """Start one worker. Returns at once, without waiting until the worker is ready."""

    async def next_exit(self) -> Exit:
        """Wait for the next worker that ends. The caller owns this wait."""

    def kill(self, name: str) -> None:
        """Kill this worker, if it still runs. `next_exit` reports when it is gone."""

    async def stop(self, grace: float) -> None:
        """End every worker. Workers that do not end by themselves within `grace` seconds are killed. Idempotent."""
