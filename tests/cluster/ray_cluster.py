"""A real Ray cluster on hosts: `with RayCluster(hosts) as cluster`. The head is on the first host.

Ray is kept running on every host as systemd would do it: when `ray start --block` ends, for example because its raylet
was killed, every process that it left is killed, and it is started again within a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE

from hosts import Host

PORT = 6379
PORTS = {
    "node-manager-port": 6380,
    "object-manager-port": 6381,
    "runtime-env-agent-port": 6382,
    "dashboard-agent-grpc-port": 6383,
    "dashboard-agent-listen-port": 6384,
    "metrics-export-port": 6385,
    "min-worker-port": 11000,
    "max-worker-port": 11999,
}
"""Every host has ports of its own, so Ray's may be the same on all."""
OBJECT_STORE_BYTES = 100 << 20
MEMORY_BYTES = 4 << 30
RESTART_SECONDS = 1.0
LOG = "/tmp/ray-start.log"
GROUP = 70_000
"""All processes of a service are in one group of users, this one plus the number of its start. No user is in it, and
nothing that a process does by itself takes it out of the group. Ray's processes overwrite their environment.
"""

# Prints which nodes are alive, again and again: the address of each, and the number of its start.
WATCH = """
import sys, time
import ray

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
while True:
    alive = [node for node in ray.nodes() if node["Alive"]]
    print(*sorted(f"{node['NodeManagerAddress']}/{node['Labels'].get('start')}" for node in alive), flush=True)
    time.sleep(0.3)
"""


class Service:
    """`ray start --block` on one host, with everything that it starts."""

    def __init__(self, host: Host, options: Sequence[str], number: int) -> None:
        self.node = f"{host.address}/{number}"
        self.killed = False
        self._host = host
        self._group = GROUP + number
        own = [f"--node-ip-address={host.address}", f"--labels=start={number}", "--disable-usage-stats"]
        sizes = [f"--object-store-memory={OBJECT_STORE_BYTES}", f"--memory={MEMORY_BYTES}"]
        ports = [f"--{name}={port}" for name, port in PORTS.items()]
        # Not the program `ray`, which may start another interpreter than this one.
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *own, *sizes, *ports, *options]
        with host.path(LOG).open("ab") as log:
            self._process = host.start(command, extra_groups=[self._group], stdin=DEVNULL, stdout=log, stderr=log)

    def has_ended(self) -> bool:
        """Return whether `ray start` has ended."""
        return self._process.poll() is not None

    def pids(self, program: str = "") -> list[int]:
        """Return the processes of this service, or those of one program of it."""
        found = []
        for pid, words in self._host.processes().items():
            with contextlib.suppress(OSError):
                groups = Path(f"/proc/{pid}/status").read_text().partition("Groups:")[2].partition("\n")[0].split()
                if str(self._group) in groups and words[0].endswith(program):
                    found.append(pid)
        return found

    def kill(self, program: str = "") -> None:
        """Kill -9 all processes of this service, or those of one program."""
        self.killed = True
        while pids := self.pids(program):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


class RayCluster:
    """Ray on hosts, from `__enter__` to `__exit__`."""

    def __init__(self, hosts: Sequence[Host], cpus: int = 2, options: Sequence[str] = ()) -> None:
        """Make a cluster whose nodes have so many CPUs. `options` are added to every `ray start`."""
        self.head = hosts[0]
        self.address = f"{self.head.address}:{PORT}"
        self._hosts = hosts
        self._options = [f"--num-cpus={cpus}", *options]
        self._starts = 0
        self._services: dict[str, Service] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keep ray running", daemon=True)

    def __enter__(self) -> RayCluster:
        """Start Ray on all hosts, without waiting until it is ready."""
        for host in self._hosts:
            self.start_raylet(host)
        self._keeper.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Kill all processes of Ray."""
        self._over.set()
        self._keeper.join()
        for host in self._hosts:
            self.stop_raylet(host)

    def start_raylet(self, host: Host) -> None:
        """Start Ray on a host that has none."""
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        role = head if host is self.head else [f"--address={self.address}"]
        with self._lock:
            self._starts += 1
            self._services[host.name] = Service(host, [*role, *self._options], self._starts)

    def stop_raylet(self, host: Host) -> None:
        """Kill all processes of Ray on a host, which has none until `start_raylet`."""
        with self._lock:
            if host.name in self._services:
                self._services.pop(host.name).kill()

    def kill_raylet(self, host: Host) -> None:
        """Kill -9 the raylet of a host, which is restarted soon."""
        with self._lock:
            self._services[host.name].kill("/raylet")

    def restart(self, host: Host) -> None:
        """Kill all processes of Ray on a host, and start Ray there again."""
        with self._lock:
            self.stop_raylet(host)
            self.start_raylet(host)

    def ready(self, timeout: float = 120.0) -> None:
        """Wait until Ray knows the latest start of every node as alive, and no other. Raises `TimeoutError`.

        Ray needs about 15 seconds to notice that a killed raylet is dead. Until then, a restarted node has two entries.
        """
        command, deadline, said = [sys.executable, "-c", WATCH, self.address], time.monotonic() + timeout, ""
        while (left := deadline - time.monotonic()) > 0:
            # The program ends early while there is no head to ask.
            watch = self.head.start(command, stdout=PIPE, stderr=DEVNULL, text=True)
            timer = threading.Timer(left, watch.kill)
            timer.start()
            with watch:
                try:
                    for said in watch.stdout:
                        if said.split() == self._wanted():
                            return
                finally:
                    timer.cancel()
                    watch.kill()
        logs = "\n".join(f"{host.name}: {host.path(LOG).read_text()[-2000:]}" for host in self._hosts)
        raise TimeoutError(f"the nodes {said.split()} are alive, not {self._wanted()}\n{logs}")

    def _wanted(self) -> list[str]:
        """Return the nodes that should be alive; an impossible one for each that was killed and not restarted yet."""
        with self._lock:
            return sorted("killed" if service.killed else service.node for service in self._services.values())

    def _keep(self) -> None:
        while not self._over.wait(RESTART_SECONDS):
            for host in self._hosts:
                with self._lock:
                    if host.name in self._services and self._services[host.name].has_ended():
                        self.restart(host)
