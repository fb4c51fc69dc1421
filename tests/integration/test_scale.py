"""Engines join and leave a live run, by command and by the rule: nothing is lost, and no version is skipped."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import QUICKSTART, headrace, segments_left, small_settings, start, worker_pids

from headrace.pipeline.elastic import VERSIONS

pytestmark = pytest.mark.slow

Begin = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begin a long run with these settings. It is killed after the test."""
    runs = []

    def run(*more: str) -> subprocess.Popen[str]:
        every = small_settings(tmp_path, "run.versions=5000", "observe.display=plain", *more)
        runs.append(start("train", str(QUICKSTART), *(part for one in every for part in ("--set", one))))
        return runs[-1]

    yield run
    for one in runs:
        one.kill()
        one.communicate(timeout=60)


def until(what: str, holds: Callable[[], object], seconds: float = 150.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.1)


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    try:
        with sqlite3.connect(f"file:{run_dir / 'journal.db'}?mode=ro", uri=True, timeout=30) as db:
            return db.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error) or "unable to open" in str(error):
            return []  # The run has not begun.
        raise


def steps(run_dir: Path) -> list[int]:
    return [step for (step,) in rows(run_dir, "SELECT step FROM steps WHERE objective = 'policy' ORDER BY rowid")]


def proved(run_dir: Path, engine: str) -> list[int]:
    query = f"SELECT version FROM deliveries WHERE accepted AND engine = '{engine}' ORDER BY rowid"
    return [version for (version,) in rows(run_dir, query)]


def engines(run_dir: Path) -> set[str]:
    return {name for name in worker_pids(run_dir) if name.startswith("engine-")}


def more_steps(run_dir: Path, count: int) -> None:
    before = len(steps(run_dir))
    until(f"{count} more steps", lambda: len(steps(run_dir)) >= before + count)


def scaled(run_dir: Path, *arguments: str) -> str:
    done = headrace("scale", str(run_dir), *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


def refused(run_dir: Path, *arguments: str) -> str:
    done = headrace("scale", str(run_dir), *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1
    return done.stderr.strip().removeprefix("headrace: ")


def metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def end(run: subprocess.Popen[str], run_dir: Path) -> str:
    """Drain the run, and check that nothing was lost or done twice on the way."""
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 130, stderr
    check_books(run_dir)
    return stdout


def check_books(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("ledger", "ledger_rollouts"):
        found = summary[name]
        assert found["admitted"] == found["trained"] + found["dropped"] + found["failed"]
        assert found["failed"] == 0, summary
    assert steps(run_dir) == list(range(1, len(steps(run_dir)) + 1)), "steps without gap or repeat"
    versions = [version for (version,) in rows(run_dir, "SELECT id FROM versions ORDER BY rowid")]
    assert versions == list(range(len(versions))), "no version is skipped"
    assert not (run_dir / "control.json").exists()
    assert worker_pids(run_dir) == {} and segments_left() == set()


def check_first_tokens(run_dir: Path, engine: str, current: int) -> None:
    """An engine that joined has drawn no token before it proved a version, which was this one or a newer one."""
    ((proof, version),) = rows(
        run_dir, f"SELECT time, version FROM deliveries WHERE accepted AND engine = '{engine}' ORDER BY rowid LIMIT 1"
    )
    first = f"SELECT ended FROM activity WHERE process = '{engine}' AND generated_tokens > 0 ORDER BY ended LIMIT 1"
    until("its first tokens", lambda: rows(run_dir, first))
    ((drawn,),) = rows(run_dir, first)
    assert drawn > proof, f"{engine} has drawn tokens before it proved version {version}"
    assert version >= current, f"{engine} joined with version {version}, which was old"


def test_engines_join_and_leave_by_command(tmp_path: Path, begin: Begin) -> None:
    run, run_dir = begin("rollouts.max_tokens=48"), tmp_path / "run"
    until("training", lambda: len(steps(run_dir)) >= 2)
    current = proved(run_dir, "engine-0")[-1]
    assert scaled(run_dir, "--engines", "3") == "engines 1 -> 3"
    until("two engines more", lambda: all(len(proved(run_dir, f"engine-{n}")) >= 2 for n in (1, 2)))
    more_steps(run_dir, 5)
    check_first_tokens(run_dir, "engine-1", current)
    check_first_tokens(run_dir, "engine-2", current)

    under_way = "SELECT 1 FROM groups WHERE state = 'in_flight' LIMIT 1"
    until("rollouts under way", lambda: rows(run_dir, under_way))
    assert scaled(run_dir, "--engines", "1") == "engines 3 -> 1"
    until("their end", lambda: engines(run_dir) == {"engine-0"})
    more_steps(run_dir, 3)
    before = {name: len(proved(run_dir, name)) for name in ("engine-1", "engine-2")}
    more_steps(run_dir, 3)
    assert before == {name: len(proved(run_dir, name)) for name in before}, "no delivery to engines that have left"

    # The second command begins from what the first one wants, and does not wait for it.
    assert scaled(run_dir, "--engines", "3") == "engines 1 -> 3"
    assert json.loads(scaled(run_dir, "--engines", "2", "--json")) == {"before": 3, "after": 2}
    until("two engines", lambda: len(proved(run_dir, "engine-1")) > before["engine-1"])
    until("two engines alone", lambda: engines(run_dir) == {"engine-0", "engine-1"})
    assert refused(run_dir, "--engines", "0") == "--engines 0: a run has 1 to 4096 engines"
    assert refused(run_dir, "--add", "http://a:1").startswith("--add: this run starts its engines itself")
    assert refused(run_dir, "--engines", "1", "--add", "x").startswith("headrace scale needs one of")
    more_steps(run_dir, 3)
    stdout = end(run, run_dir)
    for line in ("engines 1 -> 3: `headrace scale`", "engine-2 has joined", "engine-2 has left"):
        assert line in stdout
    assert rows(run_dir, "SELECT * FROM restarts") == [], "an engine that leaves is no loss"
    changes = [(one["before"], one["after"]) for one in metrics(run_dir, "engines")]
    assert changes == [(1, 3), (3, 1), (1, 3), (3, 2)]
    shares = {one["engines"]: one for one in metrics(run_dir, "idle")}
    assert {1, 3} <= set(shares)
    assert all(0 <= one[key] <= 1 for one in shares.values() for key in ("trainer_idle", "engine_idle"))
    assert refused(run_dir, "--engines", "2") == f"{run_dir}: no run is live there, on this host"


def test_an_engine_that_joined_and_is_killed_comes_back(tmp_path: Path, begin: Begin) -> None:
    run, run_dir = begin(), tmp_path / "run"
    until("training", lambda: len(steps(run_dir)) >= 2)
    scaled(run_dir, "--engines", "2")
    until("its proof", lambda: proved(run_dir, "engine-1"))
    os.kill(worker_pids(run_dir)["engine-1"], signal.SIGKILL)
    until("its death", lambda: rows(run_dir, "SELECT 1 FROM restarts WHERE process = 'engine-1'"))
    before = len(proved(run_dir, "engine-1"))
    until("its return", lambda: len(proved(run_dir, "engine-1")) >= before + 2)
    # An engine that dies and leaves before it is back is not started again.
    os.kill(worker_pids(run_dir)["engine-1"], signal.SIGKILL)
    assert scaled(run_dir, "--engines", "1") == "engines 2 -> 1"
    until("its end", lambda: engines(run_dir) == {"engine-0"})
    more_steps(run_dir, 5)
    assert engines(run_dir) == {"engine-0"}
    stdout = end(run, run_dir)
    assert "engine-1 is back" in stdout and "engine-1 has left" in stdout


def test_a_run_that_is_killed_while_it_grows_resumes_with_the_size_it_was_scaled_to(
    tmp_path: Path, begin: Begin
) -> None:
    run, run_dir = begin("training.checkpoint_every=2"), tmp_path / "run"
    until("training", lambda: len(steps(run_dir)) >= 3)
    assert scaled(run_dir, "--engines", "3") == "engines 1 -> 3"
    until("its record", lambda: rows(run_dir, "SELECT 1 FROM meta WHERE key = 'engines' AND value = '[0,1,2]'"))
    run.kill()
    run.communicate(timeout=60)
    until("its workers' end", lambda: not worker_pids(run_dir))
    assert refused(run_dir, "--engines", "2") == f"{run_dir}: no run is live there, on this host"

    versions = len(steps(run_dir)) + 6
    again = headrace("resume", str(run_dir), "--set", f"run.versions={versions}", "--set", "observe.display=none")
    assert again.returncode == 0, again.stderr
    assert all(proved(run_dir, f"engine-{rank}") for rank in range(3))
    assert steps(run_dir) == list(range(1, versions + 1))
    found = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert found["failed"] == 0 and found["admitted"] == found["trained"] + found["dropped"]
    smaller = ("engine.count=1", f"run.versions={versions + 2}")
    third = headrace("resume", str(run_dir), *(part for one in smaller for part in ("--set", one)))
    assert third.returncode == 0, third.stderr
    assert rows(run_dir, "SELECT value FROM meta WHERE key = 'engines'") == [("[0]",)], "a setting comes first"
    check_books_of_resumed(run_dir)


def check_books_of_resumed(run_dir: Path) -> None:
    versions = [version for (version,) in rows(run_dir, "SELECT id FROM versions ORDER BY rowid")]
    assert versions == sorted(set(versions)), "versions are never reused"
    assert worker_pids(run_dir) == {} and segments_left() == set()


def test_the_rule_grows_a_run_whose_trainer_waits(tmp_path: Path, begin: Begin) -> None:
    slow = ("rollouts.max_tokens=60", "engine.slots=1", "engine.count={least=1, most=2}")
    run, run_dir = begin(*slow), tmp_path / "run"
    until("growth", lambda: (run_dir / "metrics.jsonl").exists() and metrics(run_dir, "engines"))
    until("its proof", lambda: proved(run_dir, "engine-1"))
    until("a share of two", lambda: metrics(run_dir, "idle")[-1]["engines"] == 2)
    assert refused(run_dir, "--engines", "3") == "--engines 3: [engine] count allows 1 to 2"
    check_first_tokens(run_dir, "engine-1", max(one["version"] for one in metrics(run_dir, "idle")[:VERSIONS]))
    stdout = end(run, run_dir)
    assert "engines 1 -> 2: training waits for generation (idle: trainer " in stdout
    first = metrics(run_dir, "engines")[0]
    assert (first["before"], first["after"]) == (1, 2)
    shares = metrics(run_dir, "idle")
    assert any(one["engines"] == 1 and one["trainer_idle"] > 0.5 for one in shares)
    print([(one["engines"], round(one["trainer_idle"], 2), round(one["engine_idle"], 2)) for one in shares])


SLOW_LOSS = """
import time

from headrace.algorithms.losses.policy.cispo import build as build_cispo


def build(config):
    cispo = build_cispo(config)

    def loss(inputs):
        time.sleep(1.0)
        return cispo(inputs)

    return loss
"""


def test_the_rule_shrinks_a_run_whose_engines_wait(tmp_path: Path, begin: Begin) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LOSS)
    slow = (f"algorithm.loss={tmp_path}/slow.py:build", "engine.count={least=1, most=2}")
    run, run_dir = begin(*slow), tmp_path / "run"
    until("training", lambda: len(steps(run_dir)) >= 2)
    assert scaled(run_dir, "--engines", "2") == "engines 1 -> 2"
    until("its proof", lambda: proved(run_dir, "engine-1"))
    until("shrinking", lambda: len(metrics(run_dir, "engines")) >= 2)
    until("its end", lambda: engines(run_dir) == {"engine-0"})
    until("a share of one", lambda: metrics(run_dir, "idle")[-1]["engines"] == 1)
    stdout = end(run, run_dir)
    assert "engines 2 -> 1: generation waits for training (idle: trainer " in stdout
    shares = metrics(run_dir, "idle")
    assert any(one["engines"] == 2 and one["engine_idle"] > 0.5 for one in shares)
    print([(one["engines"], round(one["trainer_idle"], 2), round(one["engine_idle"], 2)) for one in shares])
