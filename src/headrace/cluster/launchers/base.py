"""The launcher protocol: start worker processes somewhere, report when one has ended, end them all.

`[pipeline] launcher = "my_launcher.py:attribute"` names a callable. It is called with the environment variables that
every worker must get in addition, and returns a `Launcher`. The smallest example changes a little in a built-in
launcher:

    from headrace.cluster.launchers.local import LocalLauncher

    class Announced(LocalLauncher):
        async def start(self, spec):
            print("starting", spec.name)
            return await super().start(spec)

A launcher of another kind starts `python -m headrace.cluster.worker_main` with `spec.arguments` and the variables of
`spec.environment` on any host.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from headrace.cluster.placement import Host, Place


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification of one worker process: everything that it starts from."""

    role: str
    rank: int
    address: str
    """The address of the controller's hub."""
    run_dir: str
    """The run directory, on the controller's host."""
    away: bool = False
    """Whether the worker is on another host. It is then not told the run directory, and gets files over the link."""
    host: str = ""
    """The name of the host on which it starts, as `Launcher.hosts` gave it. Empty for the controller's own."""
    epoch: int = 0
    """How many processes of this name were started before. The hub refuses a process of an older epoch."""
    own_address: str = ""
    """The address at which other hosts reach this worker's host. Empty on a run of one host."""
    server_key: str = ""
    """The public key of the hub. With it, the worker makes a key pair, and everything on the link is encrypted."""
    neighbours: tuple[str, ...] = ()
    """The names of the workers that share its GPU."""
    meet_at: str = ""
    """The address of its host at which this trainer rank meets the others. Empty if they meet in the run directory."""
    environment: dict[str, str] = {}
    """The environment variables of this worker alone: those that show it its GPUs."""

    @property
    def name(self) -> str:
        """The worker's name: `engine-0`, `trainer-0`, ..."""
        return f"{self.role}-{self.rank}"

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments for `headrace.cluster.worker_main`."""
        own = {"--role": self.role, "--rank": str(self.rank), "--address": self.address}
        own |= {} if self.away else {"--run": self.run_dir}
        own |= {"--epoch": str(self.epoch)} if self.epoch else {}
        own |= {"--own-address": self.own_address} if self.own_address else {}
        own |= {"--neighbours": ",".join(self.neighbours)} if self.neighbours else {}
        own |= {"--meet-at": self.meet_at} if self.meet_at else {}
        # In one word with its name, because a key may begin with a dash.
        key = [f"--server-key={self.server_key}"] if self.server_key else []
        return [*(word for pair in own.items() for word in pair), *key]


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: its exit code (negative for a signal) and the last lines of its log."""

    name: str
    code: int
    last_lines: str


class Launcher(Protocol):
    """A launcher starts and ends workers."""

    async def hosts(self) -> list[Host]:
        """Return the hosts on which workers can be started, the controller's own first."""

    async def start(self, spec: WorkerSpec) -> str:
        """Start one worker, without waiting until it is ready.

        A worker with a `server_key` first prints its own public key, as `cluster.base.KEY_LINE` followed by the key.
        Return that key, so that the hub lets the worker in; without a `server_key`, return an empty text. If the worker
        ends before it has printed its key, or its host cannot be reached, return an empty text too: `next_exit` reports
        the exit.
        """

    async def next_exit(self) -> Exit:
        """Wait for the next worker that ends. The caller owns this wait."""

    def kill(self, name: str) -> None:
        """Kill this worker, if it still runs. `next_exit` reports when it is gone."""

    async def stop(self, grace: float) -> None:
        """End every worker. Workers that do not end by themselves within `grace` seconds are killed. Idempotent."""


@runtime_checkable
class ClusterLauncher(Launcher, Protocol):
    """A launcher for several hosts, whose resources it reserves."""

    address: str
    """The address at which the hosts reach this one. It is known when `hosts` has returned."""

    async def reserve(self, places: Sequence[Place]) -> None:
        """Reserve what the workers at these places need, before their first start. `hosts` has named their hosts.

        A GPU is reserved once for all workers that share it. The reservation of a worker holds for all its starts. A
        worker that moves to another host is reserved again, with its new place. Raises `UserError` with a line that
        names what is missing, and what every host has, if it cannot be had within `[cluster] wait_seconds`.
        """
