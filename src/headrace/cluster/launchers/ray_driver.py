"""The process of a launcher that is connected to Ray: `python -m headrace.cluster.launchers.ray_driver`.

Its standard input is a socket to the launcher. It joins a running cluster, and never starts one. Each worker has a Ray
actor on its host, a `Holder`, which starts the worker as an ordinary process. A worker ends with its actor. All actors
end with the driver, and the driver ends with its connection and with its parent.

The cores and GPUs of a run are reserved in placement groups, with one bundle for each host. The actors in a bundle ask
for no GPU themselves: several workers may share one.

Ray may need a minute to notice that a host is gone. Therefore a worker whose actor does not answer is reported as ended
`KILL_SECONDS` after it was told to end, and its actor is killed when Ray reaches the host.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import Any, NoReturn

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from headrace.channel.worker_side import die_with_parent
from headrace.cluster.base import EXIT_USER_ERROR
from headrace.cluster.launchers.holder import Holder
from headrace.cluster.launchers.ray_messages import (
    KILL_SECONDS,
    LINE_BYTES,
    Answer,
    Bundle,
    Kill,
    ListNodes,
    News,
    Node,
    Request,
    Reserve,
    Start,
    WorkerEnded,
)
from headrace.cluster.placement import VISIBLE
from headrace.errors import one_line

START_SECONDS = 60.0
"""Seconds in which the actor of a worker must run, and the worker print its key."""
POLL_SECONDS = 0.5
CALLS = 8
"""How many calls an actor serves at a time: one waits for the worker's end, and others must get through beside it."""
HOW_TO_START = "start one with `ray start --head`, or use `ray job submit`"


class _Worker:
    """One start of a worker."""

    def __init__(self) -> None:
        self.actor: Any = None
        self.deadline = asyncio.timeout(None)
        """`Kill` sets this deadline, after which the worker counts as ended."""


class Driver:
    """The driver of one launcher."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._node = ray.get_runtime_context().get_node_id()
        self._groups: list[tuple[PlacementGroup, list[Bundle]]] = []
        self._workers: dict[str, _Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Serve until the launcher closes the connection."""
        self._begin(self._watch_own_node())
        while line := await reader.readline():
            request: Request = msgspec.json.decode(line, type=Request)
            match request:
                case ListNodes():
                    self._begin(self._list(request))
                case Reserve():
                    self._begin(self._reserve(request))
                case Start():
                    self._begin(self._run(request))
                    await asyncio.sleep(0)  # `_workers` must have the worker before the next request.
                case Kill():
                    self._kill(request.name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Have a task do this. An error in it ends the driver."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                traceback.print_exception(error)
                leave(1)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _send(self, news: News) -> None:
        self._writer.write(msgspec.json.encode(news) + b"\n")

    async def _watch_own_node(self) -> None:
        """End the driver when Ray has lost this host: all actors end then, and nothing more can be started."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            nodes = await asyncio.to_thread(ray.nodes)
            if self._node not in {node["NodeID"] for node in nodes if node["Alive"]}:
                raise RuntimeError("the Ray cluster has lost this host")

    async def _list(self, request: ListNodes) -> None:
        nodes = await asyncio.to_thread(_nodes)
        self._send(Answer(id=request.id, nodes=nodes, own_address=ray.util.get_node_ip_address()))

    async def _reserve(self, request: Reserve) -> None:
        # The resource `node:ADDRESS` pins a bundle to its host, also when the node was restarted.
        bundles = [
            {"CPU": bundle.cpus, "GPU": len(bundle.gpus), f"node:{bundle.address}": 0.001} for bundle in request.bundles
        ]
        group = await asyncio.to_thread(placement_group, bundles)
        deadline = time.monotonic() + request.seconds
        while not await asyncio.to_thread(group.wait, POLL_SECONDS):
            if time.monotonic() > deadline:
                self._send(Answer(id=request.id, nodes=await asyncio.to_thread(_nodes)))
                await asyncio.to_thread(remove_placement_group, group)
                return
        self._groups.append((group, request.bundles))
        self._send(Answer(id=request.id, group=len(self._groups) - 1))

    def _kill(self, name: str) -> None:
        if (worker := self._workers.get(name)) is not None and worker.deadline.when() is None:
            worker.deadline.reschedule(asyncio.get_running_loop().time() + KILL_SECONDS)
            if worker.actor is not None:
                worker.actor.kill.remote()

    async def _run(self, start: Start) -> None:
        """Start a worker, answer with its key, wait until it ends, and report its end."""
        worker, code, lines = _Worker(), -signal.SIGKILL, ""
        answer = Answer(id=start.id)
        try:
            async with worker.deadline:
                self._workers[start.name] = worker
                try:
                    async with asyncio.timeout(START_SECONDS):
                        worker.actor = await self._actor(start)
                        key = await worker.actor.key.remote(start.prints_key)
                    answer = Answer(id=start.id, key=key)
                finally:
                    self._send(answer)
                code, lines = await _end_of(worker.actor)
        except TimeoutError:
            lines = f"Ray does not reach {start.name}"
        except RayError as error:
            lines = _reason(error)
        if self._workers.get(start.name) is worker:
            del self._workers[start.name]
        self._send(WorkerEnded(name=start.name, code=code, last_lines=lines))
        if worker.actor is not None:
            await asyncio.to_thread(ray.kill, worker.actor)

    async def _actor(self, start: Start) -> Any:
        """Make the actor of a worker, which starts the worker."""
        group, bundles = self._groups[start.group]
        environment, gpus = dict(start.environment), bundles[start.bundle].gpus
        options = {"num_cpus": 0, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, start.bundle)}
        if gpus:
            # Which GPUs of a node belong to a bundle is Ray's choice, and may change when the node was restarted.
            task = ray.remote(num_gpus=len(gpus), max_calls=0, **options)(_own_gpus)
            ids = dict(zip(gpus, await (await asyncio.to_thread(task.remote)), strict=True))
            environment[VISIBLE] = ",".join(ids[gpu] for gpu in environment[VISIBLE].split(",") if gpu)
        actor = ray.remote(max_restarts=0, max_concurrency=CALLS, **options)(Holder)
        return await asyncio.to_thread(actor.remote, start.arguments, environment, start.directory)


async def _end_of(actor: Any) -> tuple[int, str]:
    """Wait until the worker of this actor ends. An actor that Ray does not reach for a while may still be there."""
    while True:
        try:
            code, lines = await actor.wait.remote()
        except ActorUnavailableError:
            await asyncio.sleep(POLL_SECONDS)
        else:
            return code, lines


def _own_gpus() -> list[str]:
    """Return the GPUs that this Ray task has, by their names for CUDA."""
    found: list[str] = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return found


def _nodes() -> list[Node]:
    free = ray._private.state.available_resources_per_node()  # Ray has no public function for this.
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has, unused = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                Node(
                    address=node["NodeManagerAddress"],
                    hostname=node["NodeManagerHostname"],
                    cpus=int(has.get("CPU", 0)),
                    gpus=int(has.get("GPU", 0)),
                    free_cpus=int(unused.get("CPU", 0)),
                    free_gpus=int(unused.get("GPU", 0)),
                )
            )
    return found


def _reason(error: Exception) -> str:
    """Return the last line of an error of Ray, which says why."""
    lines = str(error).strip().splitlines()
    return one_line(lines[-1]) if lines else type(error).__name__


def join() -> None:
    """Join the cluster that `RAY_ADDRESS` names, or else the one to which this host belongs."""
    named = os.environ.get("RAY_ADDRESS", "")
    if "://" in named or named == "local":
        mistake = f"RAY_ADDRESS={named}: Headrace must run on a node of a Ray cluster"
    else:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            return
        except (OSError, RuntimeError, ValueError) as error:
            mistake = f"no Ray cluster to join: {_reason(error)}"
    sys.stderr.write(f"{mistake} ({HOW_TO_START})\n")
    leave(EXIT_USER_ERROR)


def leave(code: int) -> NoReturn:
    """End this process at once, whatever Ray's threads do."""
    sys.stderr.flush()
    os._exit(code)


async def main() -> None:
    """Serve the launcher."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=0), limit=LINE_BYTES)
    await Driver(writer).serve(reader)
    ray.shutdown()
    leave(0)


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    join()
    asyncio.run(main())
