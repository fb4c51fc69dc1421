"""Runs on several hosts whose weights or gradients travel by gloo: they need a trusted network, and then they train."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace
from test_several_hosts import settings, temporary

from headrace.training.checkpoints.base import damage_of, latest

pytestmark = pytest.mark.slow

__all__ = ["temporary"]
TRUSTED = "cluster.trusted_network=true"


def finished(run_dir: Path, steps: int, engines: int) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["deliveries_rejected"]) == (steps, 0)
    with sqlite3.connect(run_dir / "journal.db") as db:
        ((proved,),) = db.execute("SELECT count(DISTINCT engine) FROM deliveries WHERE accepted")
    assert proved == engines


def test_weights_are_broadcast_to_engines_of_other_hosts(tmp_path: Path, temporary: Path) -> None:
    by_gloo = ("delivery.transport=nccl", "run.versions=4", "evaluate.prompts=0")
    refused = headrace("train", str(QUICKSTART), *settings(tmp_path, *by_gloo))
    assert refused.returncode == 2
    assert "[cluster] trusted_network" in refused.stderr
    run = headrace("train", str(QUICKSTART), *settings(tmp_path, *by_gloo, TRUSTED))
    assert run.returncode == 0, run.stderr
    assert "the nccl transport broadcasts them with gloo" in (tmp_path / "run/logs/trainer-0.log").read_text()
    finished(tmp_path / "run", 4, 2)


def test_ranks_of_two_hosts_train_together(tmp_path: Path, temporary: Path) -> None:
    shared = f"training.checkpoint_directory={tmp_path / 'checkpoints'}"
    two = ("training.ranks=2", shared, "run.versions=4", "evaluate.prompts=0", "training.checkpoint_every=2")
    refused = headrace("train", str(QUICKSTART), *settings(tmp_path, *two))
    assert refused.returncode == 2
    assert "[cluster] trusted_network" in refused.stderr
    run = headrace("train", str(QUICKSTART), *settings(tmp_path, *two, TRUSTED))
    assert run.returncode == 0, run.stderr
    finished(tmp_path / "run", 4, 2)
    assert not (tmp_path / "run" / "ranks.store").exists()
    checkpoint = latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and damage_of(checkpoint) == ""
