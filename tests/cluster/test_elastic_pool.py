"""Engines join and leave a real run on three hosts under Ray."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hosts import ROOT, Host
from pooled_run import PooledRun, check_ledgers, cluster, hosts, runs
from ray_cluster import RayCluster

__all__ = ["cluster", "hosts", "runs"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_engines_join_and_leave_a_live_run(cluster: RayCluster, hosts: list[Host], runs: Path) -> None:
    settings = ["engine.count=1", "run.versions=5000", "warm_start.steps=20", "evaluate.every=0", "evaluate.prompts=50"]
    run = PooledRun(cluster, hosts, runs, *settings)
    run.wait_for_step(2)

    def scale(number: int) -> str:
        command = [sys.executable, "-m", "headrace", "scale", str(run.directory), "--engines", str(number)]
        return hosts[0].run(command, env={"PYTHONPATH": str(ROOT / "src")}).stdout.strip()

    asked = time.time()
    assert scale(2) == "engines 1 -> 2"
    run.wait_to_serve("engine-1", asked)
    places = [*run.workers("trainer", 0), *run.workers("engine", 0), *run.workers("engine", 1)]
    assert sorted(places) == ["host1", "host2", "host3"], "the new engine is where no worker was"
    assert scale(1) == "engines 2 -> 1"
    run.wait_for(lambda: not run.workers("engine", 1), "the end of engine-1")
    asked = time.time()
    assert scale(2) == "engines 1 -> 2"
    run.wait_to_serve("engine-1", asked)
    summary = run.interrupt()
    check_ledgers(run, summary)
    assert run.rows("SELECT * FROM restarts") == []
