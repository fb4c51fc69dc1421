"""A run whose trainer is two processes: proved deliveries, a checkpoint that one resumes, a death with a name."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, segments_left, small_settings, start, worker_pids

import headrace as library

pytestmark = pytest.mark.slow


def settings(directory: Path, *more: str) -> list[str]:
    return [part for setting in small_settings(directory, *more) for part in ("--set", setting)]


def test_two_ranks_train_and_one_goes_on(tmp_path: Path) -> None:
    two = ("training.ranks=2", "run.versions=2", "evaluate.prompts=0", "buffer.depth=0", "training.checkpoint_every=1")
    run = headrace("train", str(QUICKSTART), *settings(tmp_path, *two), "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert summary["deliveries_proved"] == 3
    assert summary["deliveries_rejected"] == 0
    run_dir = tmp_path / "run"
    assert worker_pids(run_dir) == {}
    assert segments_left() == set()
    audit = headrace("audit", str(run_dir))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert list(library.Run(run_dir).model_dir.glob("*.safetensors"))

    again = headrace("resume", str(run_dir), "--set", "training.ranks=1", "--set", "run.versions=3", "--json")
    assert again.returncode == 0, again.stderr
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
    assert steps == [1, 2, 3]


def test_a_dead_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "training.ranks=2", "run.versions=500"))
    run_dir = tmp_path / "run"
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not (run_dir / "metrics.jsonl").is_file():
        time.sleep(0.1)
    os.kill(worker_pids(run_dir)["trainer-1"], signal.SIGKILL)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "headrace: trainer-1 died: killed by signal 9" in stderr
    assert worker_pids(run_dir) == {}
    assert segments_left() == set()
