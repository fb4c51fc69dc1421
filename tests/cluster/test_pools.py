"""Real runs on three hosts under Ray: the trainer on one or two of them, engines on the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import Host
from pooled_run import PooledRun, check_ledgers, cluster, hosts, runs
from ray_cluster import RayCluster

__all__ = ["cluster", "hosts", "runs"]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

VERSIONS = 60
"""Fewer than those of the quickstart, for time. They are enough for it to learn."""


@pytest.mark.parametrize(
    ("settings", "trainers"),
    [
        (("engine.count=2",), {"host1"}),
        (("training.ranks=2", "engine.count=1", "cluster.trusted_network=true"), {"host1", "host2"}),
    ],
)
def test_the_quickstart_learns_on_three_hosts(
    cluster: RayCluster, hosts: list[Host], runs: Path, settings: tuple[str, ...], trainers: set[str]
) -> None:
    # Ranks of several hosts write one checkpoint together.
    shared = f"training.checkpoint_directory={runs / 'checkpoints'}" if len(trainers) > 1 else "training.ranks=1"
    run = PooledRun(cluster, hosts, runs, *settings, shared, f"run.versions={VERSIONS}", "evaluate.every=0")
    run.wait_for_step(1)
    ranks = [run.workers("trainer", rank) for rank in range(len(trainers))]
    assert {host for rank in ranks for host in rank} == trainers
    engines = [run.workers("engine", rank) for rank in range(3 - len(trainers))]
    assert {host for engine in engines for host in engine} == {"host1", "host2", "host3"} - trainers
    summary = run.end()
    (prompts,) = run.rows("SELECT prompts FROM evaluations WHERE moment = 'after'")[-1]
    assert prompts == 1000 and summary["heldout_after"] >= 0.9
    assert run.rows("SELECT * FROM restarts") == []
    assert summary["steps"] == VERSIONS
    check_ledgers(run, summary)
