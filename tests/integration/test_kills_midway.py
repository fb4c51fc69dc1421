"""Kill -9 in mid-transfer and in mid-checkpoint: the run goes on with the last good state, and nobody serves a mix."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, recompute, segments_left, small_settings, start, worker_pids

pytestmark = pytest.mark.slow

TRANSPORTS = "headrace.delivery.transports"
VERSIONS = 8


def settings(directory: Path, *more: str) -> list[str]:
    mine = [f"run.versions={VERSIONS}", "training.keep_checkpoints=100", "evaluate.prompts=1", "rollouts.max_tokens=8"]
    return [part for one in small_settings(directory, *mine, *more) for part in ("--set", one)]


def examine(run_dir: Path, *, process: str) -> list[tuple[int, int]]:
    """What every run that was stopped must have kept; (after, until) of the steps that were trained again."""
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["outcome"] == "finished"
    assert ledger["trained"] == 4 * VERSIONS and ledger["in_flight"] == ledger["failed"] == 0
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
        versions = db.execute("SELECT id, step, digest FROM versions ORDER BY published, id").fetchall()
        proofs = db.execute("SELECT version, staged_digest, live_digest FROM deliveries WHERE accepted").fetchall()
        again = db.execute("SELECT from_step, to_step FROM restarts WHERE process = ?", (process,)).fetchall()
    assert steps == list(range(1, VERSIONS + 1))
    ids = [version for version, *_ in versions]
    assert ids == sorted(set(ids)), "no id stands for two publications"
    digests = {version: digest for version, _, digest in versions}
    assert proofs and all(staged == live == digests[version] for version, staged, live in proofs)
    by_step: dict[int, set[str]] = {}
    for _, step, digest in versions:
        by_step.setdefault(step, set()).add(digest)
    assert all(len(found) == 1 for found in by_step.values()), "the same weights again, to the last bit"
    compared, _ = recompute(run_dir)
    assert compared > 50, "tokens are of the version they are tagged with"
    assert worker_pids(run_dir) == {} and segments_left() == set()
    assert not list((run_dir / "checkpoints").glob(".partial*"))
    assert not (run_dir / "weights").exists()
    return again


@pytest.mark.parametrize(
    ("transport", "send", "point", "count"),
    [
        # All bytes are there and the segment is not yet declared whole.
        ("shm", "full", f"{TRANSPORTS}.segments:SharedSegment.finish", 4),
        ("shm", "delta", f"{TRANSPORTS}.segments:SharedSegment.finish", 4),
        # The file has some of its chunks.
        ("file", "full", f"{TRANSPORTS}.storage:_write_all", 75),
        ("file", "delta", f"{TRANSPORTS}.storage:_write_all", 33),
        # An engine is fetching.
        ("tcp", "full", f"{TRANSPORTS}.tcp_server:TcpSender.respond", 4),
        ("tcp", "delta", f"{TRANSPORTS}.tcp_server:TcpSender.respond", 4),
    ],
)
def test_a_trainer_killed_while_it_publishes(
    tmp_path: Path, stop: Callable[..., Path], transport: str, send: str, point: str, count: int
) -> None:
    stopped = stop("trainer", point, count)
    more = [f"delivery.transport={transport}", f"delivery.send={send}", "training.checkpoint_every=2"]
    done = headrace("train", str(QUICKSTART), *settings(tmp_path, *more))
    assert stopped.exists()
    assert done.returncode == 0, done.stderr
    ((after, until),) = examine(tmp_path / "run", process="trainer-0")
    assert until >= 1 and until - max(after, 0) <= 4


@pytest.mark.parametrize(
    ("point", "newest"),
    [
        ("headrace.training.checkpoints.base:finish_checkpoint", 1),  # filled, and not yet whole
        ("headrace.training.checkpoints.base:copy_companions", 1),  # half filled
        ("headrace.training.checkpoints.base:prune", 2),  # whole, and nobody was told
    ],
)
def test_a_trainer_killed_while_it_writes_a_checkpoint(
    tmp_path: Path, stop: Callable[..., Path], point: str, newest: int
) -> None:
    stopped = stop("trainer", point, 2)
    done = headrace("train", str(QUICKSTART), *settings(tmp_path, "training.checkpoint_every=1"))
    assert stopped.exists()
    assert done.returncode == 0, done.stderr
    ((after, until),) = examine(tmp_path / "run", process="trainer-0")
    assert after == newest, "the last one that is whole"
    assert until - after <= 2


@pytest.mark.parametrize(
    ("point", "count"),
    [
        ("headrace.training.checkpoints.base:finish_checkpoint", 2),
        (f"{TRANSPORTS}.segments:SharedSegment.finish", 4),
    ],
)
def test_all_killed_while_the_trainer_writes(tmp_path: Path, stop: Callable[..., Path], point: str, count: int) -> None:
    stopped = stop("trainer", point, count, "controller")
    run_dir = tmp_path / "run"
    run = start("train", str(QUICKSTART), *settings(tmp_path, "training.checkpoint_every=1"))
    run.communicate(timeout=100)
    assert stopped.exists() and run.returncode == -9
    deadline = time.monotonic() + 30
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker_pids(run_dir) == {}
    done = headrace("resume", str(run_dir))
    assert done.returncode == 0, done.stderr
    ((after, until),) = examine(run_dir, process="controller")
    assert 1 <= after <= until <= 4
