"""What becomes of a rollout that is cut: whatever the strategy, every token is what its version says."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, recompute, small_config, small_settings, start, worker_pids

from headrace import Run
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

LONG = (
    "warm_start.steps=0",  # Without it the model rarely ends an answer.
    "rollouts.max_tokens=50",
    "engine.slots=8",
    "training.checkpoint_every=1",
    "training.keep_checkpoints=40",
    "training.learning_rate=1e-3",
    "evaluate.prompts=1",
    "buffer.depth=2",
)

WHOLE = """(SELECT json_extract(value, '$.version') FROM meta WHERE key = 'checkpoint') = (SELECT MAX(id) FROM versions)
    AND (SELECT MAX(step) FROM steps) = (SELECT step FROM versions ORDER BY id DESC LIMIT 1)"""
"""The newest version has a checkpoint, and no step was trained after it."""


@pytest.mark.parametrize("interrupt", ["never", "abort", "drain", "block"])
def test_through_a_swap(tmp_path: Path, interrupt: str) -> None:
    config = small_config(tmp_path, *LONG, "run.versions=5", f"engine.interrupt={interrupt}")
    run_dir = start_run(config, NoProgress()).run_dir.path
    compared, mixed = recompute(run_dir)
    assert compared > 1000
    spans = interrupt in ("never", "abort")
    assert (mixed > 0) == spans, "answers span versions unless they end first"


def wait_for(run_dir: Path, sql: str, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run_dir / "journal.db").is_file():
            with sqlite3.connect(run_dir / "journal.db") as db:
                try:
                    if db.execute(sql).fetchone()[0]:
                        return
                except sqlite3.OperationalError:
                    pass
        time.sleep(0.02)
    raise TimeoutError(sql)


def begin(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    settings = [part for one in small_settings(directory, *LONG, "run.versions=8") for part in ("--set", one)]
    run = start("train", str(QUICKSTART), *settings)
    # Tokens of a version that has a checkpoint, of rollouts that go on.
    wait_for(
        directory / "run", f"SELECT COUNT(*) > 3 FROM partials WHERE (SELECT MAX(step) FROM steps) >= 3 AND {WHOLE}"
    )
    return run, directory / "run"


def killed(directory: Path) -> Path:
    """A run that was killed when its last step had a checkpoint: a step that is trained again leaves none."""
    for attempt in range(5):
        run, run_dir = begin(directory / str(attempt))
        run.kill()
        run.communicate(timeout=30)
        deadline = time.monotonic() + 30
        while worker_pids(run_dir) and time.monotonic() < deadline:
            time.sleep(0.1)
        with sqlite3.connect(run_dir / "journal.db") as db:
            if db.execute(f"SELECT {WHOLE}").fetchone()[0]:
                return run_dir
    raise AssertionError("a step was trained between each look and its kill")


def test_saved_and_resumed_across_a_restart(tmp_path: Path) -> None:
    run_dir = killed(tmp_path)
    with sqlite3.connect(run_dir / "journal.db") as db:
        saved = dict(db.execute("SELECT rollout, SUM(tokens) FROM partials GROUP BY rollout"))
        last = db.execute("SELECT MAX(id) FROM versions").fetchone()[0]
    assert saved
    parts = {rollout.id: rollout.traces[0] for rollout in saved_rollouts(run_dir)}
    again = headrace("resume", str(run_dir))
    assert again.returncode == 0, again.stderr
    assert "go on from their saved tokens" in again.stdout
    continued = 0
    for rollout in Run(run_dir).rollouts():
        if rollout.id not in saved:
            continue
        (trace,) = rollout.traces
        before = parts[rollout.id]
        kept = trace.part(0, len(before))
        assert kept.token_ids.tolist() == before.token_ids.tolist(), "nothing that was saved is sampled again"
        assert kept.logprobs.tolist() == before.logprobs.tolist()
        assert kept.versions.tolist() == before.versions.tolist()
        later = trace.versions[len(before) :]
        assert (later > last).all()
        continued += bool(before.trained.any() and len(later))
    assert continued > 0
    names = ", ".join(f"'{name}'" for name in saved)
    compared, mixed = recompute(run_dir, f"id IN ({names})")
    assert compared > 50 and mixed > 0


def saved_rollouts(run_dir: Path) -> list:
    """The saved parts, joined by hand."""
    from headrace.buffer.segments import read
    from headrace.types import Trace

    found: dict[str, list] = {}
    with sqlite3.connect(run_dir / "journal.db") as db:
        rows = db.execute("SELECT rollout, segment, offset, length FROM partials ORDER BY rollout, part").fetchall()
    for name, *where in rows:
        found.setdefault(name, []).append(read(run_dir / "segments", *where))
    for parts in found.values():
        parts[0].traces = [Trace.joined([part.traces[0] for part in parts])]
    return [parts[0] for parts in found.values()]


def test_a_cancelled_group_keeps_what_it_had(tmp_path: Path) -> None:
    run, run_dir = begin(tmp_path)
    os.kill(run.pid, signal.SIGINT)
    run.communicate(timeout=100)
    assert run.returncode == 130
    cut = list(Run(run_dir).rollouts("ending = 'aborted' AND state = 'dropped' AND sampled_tokens > 0"))
    assert cut and all(rollout.reason == "interrupted" for rollout in cut)
    compared, _ = recompute(run_dir, "ending = 'aborted'")
    assert compared > 0
