"""Workers on the hosts of a Ray cluster. Ray places processes and ends them; nothing of a run travels through Ray.

Ray is in a process of its own, the driver (`ray_driver.py`), because Ray writes to the terminal, may block for minutes,
and ends every process whose cluster loses its head. All workers end with the driver, and the driver ends with this
process. If the driver ends first, all workers are reported as ended. The next start waits until the cluster is there
again, and reserves in it what the run had reserved before.

Hosts are told apart by their addresses, and a host keeps its name: Ray may lose a node, and find it again.
"""

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.launchers.exits import ExitQueue
from headrace.cluster.launchers.ray_link import DriverEnded, DriverLink
from headrace.cluster.launchers.ray_messages import (
    KILL_SECONDS,
    Bundle,
    Kill,
    ListNodes,
    Node,
    Reserve,
    Start,
    WorkerEnded,
)
from headrace.cluster.placement import Gpu, Host, Place
from headrace.config import Config
from headrace.errors import ConfigError, UserError

JOIN_SECONDS = 60.0
"""Seconds in which the driver must have joined the cluster."""
POLL_SECONDS = 0.5


class RayLauncher(ExitQueue):
    """A `ClusterLauncher` for the Ray cluster to which this host belongs."""

    command: Sequence[str] = ("-m", "headrace.cluster.worker_main")
    """The arguments with which Python starts every worker, before those of its specification."""

    def __init__(self, config: Config, environment: Mapping[str, str] | None = None) -> None:
        """Make a launcher, without joining the cluster; `environment` is added to that of every worker."""
        super().__init__()
        if find_spec("ray") is None:
            raise ConfigError("[pipeline] launcher = \"ray\" needs Ray: pip install 'headrace[ray]'")
        self.address = ""
        self._config = config.cluster
        self._environment = {"TOKENIZERS_PARALLELISM": "false", **(environment or {})}
        self._hosts: dict[str, Host] = {}
        """Address -> the host, as it was when it was last seen."""
        self._places: dict[str, Place] = {}
        """Worker -> its place, for which its bundle is reserved."""
        self._bundles: dict[str, tuple[int, int]] = {}
        """Worker -> the number of its group, and of its bundle in the group."""
        # `_running` has the workers that the driver runs or starts. `_idle` is set while there are none.
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._opening = asyncio.Lock()
        self._driver: DriverLink | None = None

    async def hosts(self) -> list[Host]:
        """Return the nodes that are alive, this host first.

        The first call joins the cluster, and waits for hosts that are named but missing. Later calls return the hosts
        that there are.
        """
        named, again = set(self._config.hosts), bool(self._hosts)
        deadline = time.monotonic() + self._config.wait_seconds
        while True:
            present = await self._present()
            missing = named - {host.name for host in present} - {host.address for host in present}
            if again or not missing:
                return sorted(present, key=lambda host: host.address != self.address)
            if time.monotonic() > deadline:
                there = ", ".join(host.name for host in present)
                raise ConfigError(f"[cluster] hosts: the Ray cluster has no {min(missing)!r} (there are {there})")
            await asyncio.sleep(POLL_SECONDS)

    async def reserve(self, places: Sequence[Place]) -> None:
        """See `ClusterLauncher.reserve`. Cores are reserved by compute threads, but never more than a host has."""
        driver = await self._connected()
        try:
            await self._reserve(driver, places)
        except DriverEnded as error:
            raise UserError(str(error)) from error

    async def start(self, spec: WorkerSpec) -> str:
        """See `Launcher.start`. The place of the worker must be reserved."""
        try:
            driver = await self._connected()
        except UserError as error:
            self._exits.put_nowait(Exit(name=spec.name, code=-signal.SIGKILL, last_lines=str(error)))
            return ""
        self._running.add(spec.name)
        self._idle.clear()
        group, bundle = self._bundles[spec.name]
        request = Start(
            id=driver.next_id(),
            name=spec.name,
            group=group,
            bundle=bundle,
            arguments=[*self.command, *spec.arguments],
            environment={**self._environment, **spec.environment},
            directory=str(Path.cwd()),
            prints_key=bool(spec.server_key),
        )
        try:
            return (await driver.ask(request)).key
        except DriverEnded:
            return ""  # All workers of the driver are reported as ended.
        except asyncio.CancelledError:
            self.kill(spec.name)
            raise

    def kill(self, name: str) -> None:
        """See `Launcher.kill`."""
        if name in self._running and self._driver is not None:
            self._driver.send(Kill(name=name))

    async def stop(self, grace: float) -> None:
        """See `Launcher.stop`. What was reserved is free again."""
        await self._all_ended(grace)
        for name in self._running:
            self.kill(name)
        await self._all_ended(2 * KILL_SECONDS)
        if self._driver is not None:
            await self._driver.end()

    async def _all_ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def _connected(self) -> DriverLink:
        """Return the driver. Start one, and reserve what the run has reserved before, if there is none.

        Raises `UserError` if there is no cluster. A cluster that was there is waited for.
        """
        deadline = time.monotonic() + self._config.wait_seconds
        async with self._opening:
            while self._driver is None:
                try:
                    await self._open()
                except UserError:
                    if not self._places or time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(POLL_SECONDS)
            return self._driver

    async def _open(self) -> None:
        driver = await DriverLink.start(self._ended)
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await driver.ask(ListNodes(id=driver.next_id()))
            if self._places:
                await self._reserve(driver, list(self._places.values()))
        except TimeoutError as error:
            raise UserError(f"the Ray cluster does not answer within {JOIN_SECONDS:g} s") from error
        except DriverEnded as error:
            raise UserError(str(error)) from error
        else:
            self._driver = driver
            self._own(asyncio.create_task(self._watch(driver), name="watch the Ray driver"))
        finally:
            if self._driver is not driver:
                await driver.end()

    async def _watch(self, driver: DriverLink) -> None:
        """Report all workers as ended when the driver has ended."""
        reason = await driver.over
        self._driver = None
        for name in list(self._running):
            self._ended(WorkerEnded(name=name, code=-signal.SIGKILL, last_lines=reason))

    def _ended(self, news: WorkerEnded) -> None:
        self._running.discard(news.name)
        self._exits.put_nowait(Exit(name=news.name, code=news.code, last_lines=news.last_lines))
        if not self._running:
            self._idle.set()

    async def _present(self) -> list[Host]:
        """Return the nodes that are alive, as hosts."""
        driver = await self._connected()
        try:
            answer = await driver.ask(ListNodes(id=driver.next_id()))
        except DriverEnded as error:
            raise UserError(str(error)) from error
        self.address = answer.own_address
        return self._as_hosts(answer.nodes)

    def _as_hosts(self, nodes: Sequence[Node]) -> list[Host]:
        # A node that was restarted may be there twice for a while.
        by_address = {node.address: node for node in nodes}
        names = Counter(node.hostname for node in by_address.values())
        for address, node in by_address.items():
            known = self._hosts.get(address)
            name = known.name if known else node.hostname if names[node.hostname] == 1 else address
            self._hosts[address] = Host(name, tuple(Gpu(str(i)) for i in range(node.gpus)), node.cpus, address)
        return [self._hosts[address] for address in sorted(by_address)]

    async def _reserve(self, driver: DriverLink, places: Sequence[Place]) -> None:
        hosts = {host.name: host for host in self._hosts.values()}
        bundles = []
        for name in dict.fromkeys(place.host for place in places):
            here = [place for place in places if place.host == name]
            threads = sum(place.threads for place in here if place.role != "gateway")
            gpus = {gpu for place in here for gpu in place.gpus}
            bundles.append(
                Bundle(
                    address=hosts[name].address,
                    cpus=min(threads, hosts[name].cores),
                    gpus=tuple(sorted(gpus, key=int)),
                )
            )
        seconds = self._config.wait_seconds
        answer = await driver.ask(Reserve(id=driver.next_id(), bundles=bundles, seconds=seconds))
        if answer.group is None:
            raise UserError(f"no reservation in Ray within {seconds:g} s: {self._missing(bundles, answer.nodes)}")
        order = [bundle.address for bundle in bundles]
        for place in places:
            self._places[place.name] = place
            self._bundles[place.name] = answer.group, order.index(hosts[place.host].address)

    def _missing(self, bundles: Sequence[Bundle], nodes: Sequence[Node]) -> str:
        """Say in one line which hosts lack what, and what every host has."""
        self._as_hosts(nodes)
        there = {node.address: node for node in nodes}
        found = []
        for bundle in bundles:
            name, node = self._hosts[bundle.address].name, there.get(bundle.address)
            if node is None:
                found.append(f"{name} is gone")
                continue
            for kind, need, free in (("CPUs", bundle.cpus, node.free_cpus), ("GPUs", len(bundle.gpus), node.free_gpus)):
                if free < need:
                    found.append(f"{name} lacks {need - free} of the {need} {kind} that the run needs")
        for node in sorted(there.values(), key=lambda node: node.address):
            unused = f"{node.free_cpus} of {node.cpus} CPUs and {node.free_gpus} of {node.gpus} GPUs"
            found.append(f"{self._hosts[node.address].name} has {unused} free")
        return "; ".join(found)
