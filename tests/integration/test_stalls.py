"""An engine that lives and does nothing: `headrace stall` names it, and it is started again like one that died."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, segments_left, small_settings, start, worker_pids
from test_deaths import wait_until_training

pytestmark = pytest.mark.slow


def waits(run_dir: Path) -> dict[str, tuple[str, float]]:
    """Who waits for what, and since when, as the command says it."""
    said = headrace("stall", str(run_dir), "--json")
    return {wait["owner"]: (wait["what"], wait["seconds"]) for wait in json.loads(said.stdout)["waits"]}


def stop_with_requests(run_dir: Path, engine: int) -> None:
    """Stop it at a moment when it has requests: between two versions it may have none."""
    for _ in range(20):
        os.kill(engine, signal.SIGSTOP)
        time.sleep(2.5)
        if any(what == "a token of engine-0" and since > 2 for what, since in waits(run_dir).values()):
            return
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.3)
    raise AssertionError("it never had requests")


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_an_engine_that_makes_no_progress_is_named_and_started_again(
    tmp_path: Path, stop: Callable[..., Path], how: str
) -> None:
    if how == "hangs":  # It answers: beats and messages have threads of their own.
        stop("engine", "headrace.engines.embedded.core:EngineCore.step", 60, "nobody")
    mine = ["run.versions=500", "pipeline.stall_seconds=30", "observe.display=plain"]
    run = start("train", str(QUICKSTART), *(p for s in small_settings(tmp_path, *mine) for p in ("--set", s)))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 1)
    victim = worker_pids(run_dir)["engine-0"]
    if how == "stopped":
        stop_with_requests(run_dir, victim)
    named: dict[str, tuple[str, float]] = {}
    deadline = time.monotonic() + 120
    while Path(f"/proc/{victim}").exists() and time.monotonic() < deadline:
        if (run_dir / "status.json").exists():
            found = waits(run_dir)
            named |= {owner: wait for owner, wait in found.items() if wait[1] > 2}
        time.sleep(0.5)
    assert not Path(f"/proc/{victim}").exists()
    assert any(" request" in owner and what == "a token of engine-0" for owner, (what, _) in named.items()), named
    assert "groups are ready" in named["train"][0]
    with sqlite3.connect(run_dir / "journal.db") as db:
        (done,) = db.execute("SELECT count(*) FROM steps WHERE objective = 'policy'").fetchone()
    wait_until_training(run_dir, done + 3)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 130, stderr
    assert "engine-0 has requests and sent no token for 15 s: it is ended" in stdout
    assert "engine-0 is back" in stdout
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert ledger["failed"] == 0 and ledger["in_flight"] == 0, "its requests were resumed"
    assert segments_left() == set()
