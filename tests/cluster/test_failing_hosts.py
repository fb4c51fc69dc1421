"""Hosts and processes of a real run on three hosts under Ray fail, and come back."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from hosts import Host
from pooled_run import PooledRun, check_ledgers, cluster, hosts, runs
from ray_cluster import RayCluster

__all__ = ["cluster", "hosts", "runs"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NOTICE_SECONDS = 15.0
"""In so many seconds, the run must have noticed that a worker is dead."""
AWAY_SECONDS = 60.0


def test_hosts_and_processes_fail_and_come_back(cluster: RayCluster, hosts: list[Host], runs: Path) -> None:
    settings = ["engine.count=2", "run.versions=5000", "training.checkpoint_every=10", "pipeline.restarts=10"]
    settings += ["warm_start.steps=20", "evaluate.every=0", "evaluate.prompts=50"]
    run = PooledRun(cluster, hosts, runs, *settings)
    _, second, third = hosts
    run.wait_for_step(3)

    # A worker is killed.
    killed = time.time()
    os.kill(run.workers("engine", 0)["host2"], signal.SIGKILL)
    assert run.noticed("engine-0", killed) < NOTICE_SECONDS
    run.wait_to_serve("engine-0", killed)

    # A raylet is killed, and started again as systemd would. Its worker ends with it.
    killed = time.time()
    cluster.kill_raylet(second)
    assert run.noticed("engine-0", killed) < NOTICE_SECONDS
    run.wait_to_serve("engine-0", killed)

    # The link of a host is cut for a minute. The old process goes on there, and is not let in again.
    cut = time.time()
    third.cut()
    assert run.noticed("engine-1", cut) < NOTICE_SECONDS
    time.sleep(max(0.0, cut + AWAY_SECONDS - time.time()))
    healed = time.time()
    third.heal()
    run.wait_to_serve("engine-1", healed)

    # An engine stands still for a minute, and so does everything on its host that could end it. When it goes on, it
    # ends itself: it has heard nothing for long, or is refused, because a newer one has its place. Its parent does not
    # collect it, so the system keeps its exit code.
    (old,) = run.workers("engine", 1).values()
    stopped, still = time.time(), list(third.processes())
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    assert run.noticed("engine-1", stopped) < NOTICE_SECONDS
    time.sleep(max(0.0, stopped + AWAY_SECONDS - time.time()))
    os.kill(old, signal.SIGCONT)
    run.wait_for(lambda: state(old) == "Z", "the end of the engine that was replaced")
    assert exit_code(old) == EXIT_ORPHAN
    returned = time.time()
    for pid in still:
        os.kill(pid, signal.SIGCONT)
    run.wait_to_serve("engine-1", returned)

    # Every engine has the newest versions, and the run ends in order.
    summary = run.interrupt()
    check_ledgers(run, summary)
    sql = "SELECT max(version) FROM deliveries WHERE engine = ? AND accepted"
    newest = [run.rows(sql, engine)[0][0] for engine in ("engine-0", "engine-1")]
    assert abs(newest[0] - newest[1]) <= 1, newest


EXIT_ORPHAN = 3
"""The exit code of a worker that was refused, or has lost its controller."""


def state(pid: int) -> str:
    return _stat(pid)[0]


def exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended and was not collected yet."""
    return os.waitstatus_to_exitcode(int(_stat(pid)[-1]))


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
