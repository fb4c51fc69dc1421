"""The launcher for Ray, on a real cluster of two nodes on this host, with small processes in the place of workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.cluster.launchers.base import ClusterLauncher, Exit, WorkerSpec
from headrace.cluster.launchers.local import make_launcher
from headrace.cluster.launchers.ray import RayLauncher
from headrace.cluster.placement import Place
from headrace.config import Config, load_config
from headrace.errors import ConfigError, UserError
from waiting import alive, until

if TYPE_CHECKING:  # Other suites collect this file where Ray is not installed.
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
FIRST, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
NOWHERE = "127.0.0.2:1"
SECONDS = 120.0

WORKER = """
import ctypes, json, os, pathlib, signal, sys, time

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # A worker does this, too: it ends with its parent.
note = pathlib.Path(os.environ["NOTE"])
note.with_suffix(".new").write_text(json.dumps({"pid": os.getpid(), "actor": os.getppid(), **os.environ}))
note.with_suffix(".new").rename(note)
if "--server-key" in " ".join(sys.argv):
    print("headrace worker key: PUBLIC")
exec(os.environ["DO"])
"""
SLEEP = "time.sleep(600)"


class SmallLauncher(RayLauncher):
    """The launcher, with `WORKER` in the place of every worker."""

    command = ("-c", WORKER)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes that believe in GPUs."""
    cluster = start_cluster({"num_cpus": 4, "num_gpus": 4, "node_ip_address": FIRST})
    add_second(cluster)
    yield cluster
    cluster.shutdown()


def start_cluster(node: dict[str, Any]) -> Cluster:
    """A cluster with this node as its head."""
    from ray.cluster_utils import Cluster

    return Cluster(True, head_node_args=node)


def add_second(cluster: Cluster) -> Any:
    node = cluster.add_node(num_cpus=2, num_gpus=2, node_ip_address=SECOND)
    cluster.wait_for_nodes()
    return node


@pytest.fixture
def address(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    return str(cluster.address)


@pytest.fixture
async def launcher(address: str) -> AsyncIterator[SmallLauncher]:
    launcher = SmallLauncher(config())
    await launcher.hosts()
    yield launcher
    await launcher.stop(0.0)


def config(*settings: str) -> Config:
    return load_config(QUICKSTART, ["pipeline.launcher=ray", *settings])


class Worker:
    """A worker of a launcher, at one place for all its starts."""

    def __init__(self, launcher: RayLauncher, directory: Path, place: Place) -> None:
        self.place = place
        self._launcher = launcher
        self._note = directory / f"{place.name}.json"

    async def start(self, do: str = SLEEP) -> str:
        self._note.unlink(missing_ok=True)
        environment = {**self.place.environment, "NOTE": str(self._note), "DO": do}
        spec = WorkerSpec(
            role=self.place.role,
            rank=self.place.rank,
            address="tcp://127.0.0.1:1",
            run_dir="",
            host=self.place.host,
            server_key="SERVER",
            environment=environment,
        )
        return await asyncio.wait_for(self._launcher.start(spec), SECONDS)

    @property
    def noted(self) -> dict[str, Any]:
        """What the worker's process wrote about itself: its id, its actor's id, and its environment."""
        return json.loads(self._note.read_text())  # type: ignore[no-any-return]

    async def exit(self) -> Exit:
        return await asyncio.wait_for(self._launcher.next_exit(), SECONDS)


def at(rank: int, host: str, *gpus: str) -> Place:
    return Place(role="engine", rank=rank, host=host, gpus=gpus)


@pytest.fixture
async def worker(launcher: SmallLauncher, tmp_path: Path) -> Worker:
    """A worker on the second node."""
    worker = Worker(launcher, tmp_path, at(0, SECOND))
    await launcher.reserve([worker.place])
    return worker


async def test_every_node_is_a_host_and_this_one_is_first(address: str) -> None:
    launcher = make_launcher(config())
    assert isinstance(launcher, RayLauncher)
    assert isinstance(launcher, ClusterLauncher)
    hosts = await launcher.hosts()
    assert [(host.name, host.address, host.cores) for host in hosts] == [(FIRST, FIRST, 4), (SECOND, SECOND, 2)]
    assert [[gpu.id for gpu in host.gpus] for host in hosts] == [["0", "1", "2", "3"], ["0", "1"]]
    assert launcher.address == FIRST
    await launcher.stop(0.0)


async def test_a_host_that_is_named_and_missing_is_told(address: str) -> None:
    launcher = make_launcher(config(f'cluster.hosts=["{SECOND}", "node9"]', "cluster.wait_seconds=1"))
    with pytest.raises(ConfigError) as refused:
        await launcher.hosts()
    assert str(refused.value) == f"[cluster] hosts: the Ray cluster has no 'node9' (there are {FIRST}, {SECOND})"
    await launcher.stop(0.0)


async def test_a_worker_tells_its_key_runs_apart_and_is_killed(worker: Worker, launcher: SmallLauncher) -> None:
    assert await worker.start() == "PUBLIC"
    pid = worker.noted["pid"]
    assert os.getsid(pid) == pid
    assert worker.noted["CUDA_VISIBLE_DEVICES"] == ""
    assert [name for name in worker.noted if name.startswith("RAY_")] == []
    launcher.kill(worker.place.name)
    assert await worker.exit() == Exit(name="engine-0", code=-signal.SIGKILL, last_lines="")
    assert not alive(pid)
    launcher.kill(worker.place.name)
    assert await worker.start() == "PUBLIC"


@pytest.mark.parametrize(
    ("do", "code", "lines"),
    [
        ("print('one'); print('two', file=sys.stderr); sys.exit(7)", 7, "one\ntwo"),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    ],
)
async def test_the_end_of_a_worker_is_told(worker: Worker, do: str, code: int, lines: str) -> None:
    assert await worker.start(do) == "PUBLIC"
    assert await worker.exit() == Exit(name="engine-0", code=code, last_lines=lines)


async def test_a_worker_that_ends_without_a_key_is_told(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SmallLauncher, "command", ("-c", "raise SystemExit('no such model')"))
    assert await worker.start() == ""
    assert await worker.exit() == Exit(name="engine-0", code=1, last_lines="no such model")


async def test_a_worker_ends_with_its_actor(worker: Worker) -> None:
    await worker.start()
    pid = worker.noted["pid"]
    os.kill(worker.noted["actor"], signal.SIGKILL)
    exited = await worker.exit()
    assert (exited.code, len(exited.last_lines.splitlines())) == (-signal.SIGKILL, 1)
    await until(lambda: not alive(pid))


async def test_an_actor_that_does_not_answer_is_given_up(worker: Worker, launcher: SmallLauncher) -> None:
    """As on a host whose link is cut, which Ray does not notice for a long time."""
    await worker.start()
    pid = worker.noted["pid"]
    os.kill(worker.noted["actor"], signal.SIGSTOP)
    launcher.kill(worker.place.name)
    exited = await worker.exit()
    assert exited == Exit(name="engine-0", code=-signal.SIGKILL, last_lines="Ray does not reach engine-0")
    await worker.start()
    os.kill(worker.noted["actor"], signal.SIGSTOP)
    began = time.monotonic()
    await launcher.stop(0.0)
    assert time.monotonic() - began < 60
    await until(lambda: not alive(pid) and not alive(worker.noted["pid"]))


async def test_stop_leaves_no_worker_and_no_reservation(launcher: SmallLauncher, tmp_path: Path, address: str) -> None:
    workers = [Worker(launcher, tmp_path, at(0, FIRST, "0", "1", "2", "3")), Worker(launcher, tmp_path, at(1, SECOND))]
    await launcher.reserve([worker.place for worker in workers])
    await asyncio.gather(*(worker.start() for worker in workers))
    await launcher.stop(0.1)
    await launcher.stop(0.1)
    assert [worker.place.name for worker in workers if alive(worker.noted["pid"])] == []
    another = SmallLauncher(config())
    await another.hosts()
    await another.reserve([workers[0].place])
    await another.stop(0.0)


@pytest.fixture
def other_job(address: str) -> Iterator[list[str]]:
    """Another job, in this process. It has two GPUs of the first node."""
    import ray

    def gpus() -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]  # type: ignore[no-any-return]

    ray.init(address=address, log_to_driver=False)
    group = ray.util.placement_group([{"GPU": 2, f"node:{FIRST}": 0.001}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    yield ray.get(ray.remote(num_gpus=2, num_cpus=0, scheduling_strategy=strategy)(gpus).remote())
    ray.shutdown()


async def test_workers_share_the_gpus_that_ray_gives_the_run(
    launcher: SmallLauncher, tmp_path: Path, other_job: list[str]
) -> None:
    places = [at(0, FIRST, "0"), at(1, FIRST, "1"), Place(role="trainer", rank=0, host=FIRST, gpus=("1",), maps=("0",))]
    workers = [Worker(launcher, tmp_path, place) for place in places]
    await launcher.reserve([*places, Place(role="gateway", rank=0, host=SECOND)])
    await asyncio.gather(*(worker.start() for worker in workers))
    seen = [worker.noted["CUDA_VISIBLE_DEVICES"] for worker in workers]
    assert sorted([*other_job, *seen[:2]]) == ["0", "1", "2", "3"]
    assert seen[2] == f"{seen[1]},{seen[0]}"


async def test_an_impossible_reservation_is_named(address: str) -> None:
    launcher = SmallLauncher(config("cluster.wait_seconds=1"))
    await launcher.hosts()
    with pytest.raises(UserError) as refused:
        await launcher.reserve([at(0, SECOND, "0", "1", "2"), at(1, FIRST)])
    assert str(refused.value) == (
        f"no reservation in Ray within 1 s: {SECOND} lacks 1 of the 3 GPUs that the run needs; "
        f"{FIRST} has 4 of 4 CPUs and 4 of 4 GPUs free; {SECOND} has 2 of 2 CPUs and 2 of 2 GPUs free"
    )
    await launcher.stop(0.0)


async def test_a_node_that_dies_and_returns_is_used_again(worker: Worker, cluster: Cluster) -> None:
    await worker.start()
    pid = worker.noted["pid"]
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    assert (await worker.exit()).code == -signal.SIGKILL
    await until(lambda: not alive(pid))
    add_second(cluster)
    assert await worker.start() == "PUBLIC"


DRIVER = """
import asyncio, pathlib, sys
sys.path[:0] = sys.argv[1:3]
from test_ray_launcher import SmallLauncher, Worker, at, config

async def main():
    launcher = SmallLauncher(config())
    worker = Worker(launcher, pathlib.Path(sys.argv[3]), at(0, sys.argv[4]))
    await launcher.hosts()
    await launcher.reserve([worker.place])
    await worker.start()
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_workers_end_with_the_launcher_and_nothing_else_is_printed(address: str, tmp_path: Path) -> None:
    own = [str(Path(__file__).parent), str(ROOT / "tests")]
    driver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", DRIVER, *own, str(tmp_path), SECOND),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert driver.stdout is not None
    assert await asyncio.wait_for(driver.stdout.readline(), SECONDS) == b"started\n"
    pid = json.loads((tmp_path / "engine-0.json").read_text())["pid"]
    assert alive(pid)
    driver.kill()
    assert await driver.stdout.read() == b""
    await until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("address", "line"),
    [
        (
            "ray://127.0.0.1:10001",
            "RAY_ADDRESS=ray://127.0.0.1:10001: Headrace must run on a node of a Ray cluster (start",
        ),
        (
            "local",
            "RAY_ADDRESS=local: Headrace must run on a node of a Ray cluster (start one with `ray start --head`, ",
        ),
        ("no address", "no Ray cluster to join: "),
        (NOWHERE, "the Ray cluster does not answer within 3 s"),
    ],
)
async def test_an_address_without_a_cluster_is_told(monkeypatch: pytest.MonkeyPatch, address: str, line: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    if address == NOWHERE:
        monkeypatch.setattr("headrace.cluster.launchers.ray.JOIN_SECONDS", 3.0)
    with pytest.raises(UserError) as refused:
        await make_launcher(config()).hosts()
    assert str(refused.value).startswith(line)
    assert len(str(refused.value).splitlines()) == 1


async def test_a_driver_that_dies_is_replaced(worker: Worker, launcher: SmallLauncher) -> None:
    """Ray ends its driver, for example, when the cluster loses its head."""
    await worker.start()
    pid = worker.noted["pid"]
    (driver,) = children("headrace.cluster.launchers.ray_driver")
    os.kill(driver, signal.SIGKILL)
    exited = await worker.exit()
    assert exited == Exit(name="engine-0", code=-signal.SIGKILL, last_lines="the Ray driver ended: exit code -9")
    assert await worker.start() == "PUBLIC"
    await until(lambda: not alive(pid))


async def test_a_cluster_that_was_gone_is_joined_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((THIRD, 0)) as listening:
        port = listening.getsockname()[1]
    node = {"num_cpus": 1, "num_gpus": 2, "node_ip_address": THIRD, "gcs_server_port": port}
    first = start_cluster(node)
    monkeypatch.setenv("RAY_ADDRESS", first.address)
    monkeypatch.setenv(
        "RAY_gcs_rpc_server_reconnect_timeout_s", "3"
    )  # Ray ends a driver without a head after a minute.
    launcher = SmallLauncher(config())
    (host,) = await launcher.hosts()
    worker = Worker(launcher, tmp_path, at(0, host.name, "1"))
    await launcher.reserve([worker.place])
    assert await worker.start() == "PUBLIC"
    pid = worker.noted["pid"]
    first.shutdown()
    exited = await worker.exit()
    assert (exited.code, len(exited.last_lines.splitlines())) == (-signal.SIGKILL, 1)
    starting = asyncio.create_task(worker.start())
    second = start_cluster(node)
    while not await starting:
        # The driver had not noticed yet that the cluster was gone.
        assert (await worker.exit()).code == -signal.SIGKILL
        starting = asyncio.create_task(worker.start())
    assert not alive(pid)
    await launcher.stop(0.0)
    second.shutdown()


def children(module: str) -> list[int]:
    """The processes that this one has started with a module."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_text().split("\0")
            if module in command and (process / "stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.append(int(process.name))
    return found
