"""A run with two real vLLM servers outlives its members."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from example_runs import EXAMPLE, balanced, settings
from runs import SMALL, start, worker_pids

from conftest import START_SECONDS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

UNHURRIED = Path(__file__).parent / "unhurried_reward.py"


def server_pid(engine: int) -> int:
    """The process of the server that this engine process started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            command = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if parent == engine and "vllm.entrypoints" in command:
            return int(stat.parent.name)
    raise AssertionError(f"process {engine} has no server")


def segments_of(process: int) -> list[Path]:
    """What it left in shared memory."""
    return list(Path("/dev/shm").glob(f"headrace-*-{process}-*"))


class Watched:
    """What the journal of a run says while it runs."""

    def __init__(self, run: subprocess.Popen[str], run_dir: Path) -> None:
        self._run = run
        self._journal = run_dir / "journal.db"

    def rows(self, query: str) -> list[tuple[object, ...]]:
        if not self._journal.is_file():
            return []
        with sqlite3.connect(f"file:{self._journal}?mode=ro", uri=True) as db:
            tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master")}
            return db.execute(query).fetchall() if {"steps", "deliveries", "restarts"} <= tables else []

    def steps(self) -> int:
        return len(self.rows("SELECT 1 FROM steps WHERE objective = 'policy'"))

    def proved(self, engine: str) -> list[int]:
        rows = self.rows(f"SELECT version FROM deliveries WHERE accepted AND engine = '{engine}' ORDER BY rowid")
        return [int(str(version)) for (version,) in rows]

    def lives(self, engine: str) -> int:
        return 1 + len(self.rows(f"SELECT 1 FROM restarts WHERE process = '{engine}'"))

    def until(self, what: str, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not holds():
            assert self._run.poll() is None, self._run.communicate()
            assert time.monotonic() < deadline, f"{what}: not in time"
            time.sleep(0.2)


def test_a_fleet_outlives_the_death_of_a_server_and_of_an_engine_process(tmp_path: Path) -> None:
    """Each is killed -9 in the middle of the run: nothing is lost, and each rejoins at the version that is current."""
    more = [*SMALL, "run.versions=5000", "engine.count=2", "engine.slots=16", "observe.display=plain"]
    more += [f"task.reward={UNHURRIED}:reward"]
    run = start("train", EXAMPLE, *settings(tmp_path, *more))
    watched = Watched(run, tmp_path / "run")
    try:
        watched.until("training", lambda: watched.steps() >= 3 and watched.proved("engine-0"))
        trainer = worker_pids(tmp_path / "run")["trainer-0"]
        for victim, other in (("engine-0", "engine-1"), ("engine-1", "engine-0")):
            watched.until("two that serve", lambda other=other: watched.proved(other))
            engine = worker_pids(tmp_path / "run")[victim]
            os.kill(server_pid(engine) if victim == "engine-0" else engine, signal.SIGKILL)
            watched.until("its loss", lambda victim=victim: watched.lives(victim) == 2)
            had, steps = watched.proved(victim), watched.steps()
            watched.until("steps without it", lambda steps=steps: watched.steps() >= steps + 2)
            current = watched.proved(other)[-1]
            watched.until("its return", lambda victim=victim, had=had: len(watched.proved(victim)) >= len(had) + 2)
            assert watched.proved(victim)[len(had)] >= current > had[-1], "it rejoins at the current version"
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=START_SECONDS)
    finally:
        run.kill()
        run.communicate(timeout=60)
    assert run.returncode == 130, stderr
    assert balanced(json.loads((tmp_path / "run" / "summary.json").read_text()))["failed"] == 0
    assert "engine-0 died: vLLM died: the vLLM server ended (killed by signal 9)" in stdout
    assert "engine-1 died: killed by signal 9; it is started again" in stdout
    assert "engine-0 is back" in stdout and "engine-1 is back" in stdout
    assert worker_pids(tmp_path / "run") == {} and segments_of(trainer) == []
