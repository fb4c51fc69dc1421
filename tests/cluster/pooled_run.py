"""A run on three hosts under Ray, as the tests of pools start it, look into it and end it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hosts import ROOT, Host, Hosts
from ray_cluster import RayCluster

QUICKSTART = "examples/quickstart/quickstart.toml"
RUN_SECONDS = 600.0
EVENT_SECONDS = 150.0
"""The longest that a test waits for something to happen in a run."""
WORKER = "headrace.cluster.worker_main"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[Host]) -> Iterator[RayCluster]:
    with RayCluster(hosts) as made:
        made.ready()
        yield made


@pytest.fixture
def runs() -> Iterator[Path]:
    """A directory that all hosts see, as they do not see `/tmp`. Only the first one uses it."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="pools-") as made:
        yield Path(made)


class PooledRun:
    """A run that was started on the first host."""

    def __init__(self, cluster: RayCluster, hosts: list[Host], runs: Path, *settings: str) -> None:
        self.hosts = hosts
        self.directory = runs / "run"
        every = (f"run.directory={runs}", "run.name=run", "pipeline.launcher=ray", "observe.display=plain")
        options = [part for setting in (*every, *settings) for part in ("--set", setting)]
        self._output = runs / "output.txt"
        with self._output.open("wb") as output:
            self.process = hosts[0].start(
                [sys.executable, "-m", "headrace", "train", QUICKSTART, *options],
                env={"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT / "src")},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def rows(self, sql: str, *given: Any) -> list[tuple[Any, ...]]:
        """Return what the journal answers; nothing as long as there is no journal."""
        if not (self.directory / "journal.db").is_file():
            return []
        with closing(sqlite3.connect(self.directory / "journal.db", timeout=30)) as db:
            try:
                return db.execute(sql, given).fetchall()
            except sqlite3.OperationalError:  # The tables are not there yet.
                return []

    def wait_for(self, holds: Callable[[], object], what: str, seconds: float = EVENT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the run ended before {what}\n{self.said()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come\n{self.said()[-3000:]}"
            time.sleep(0.1)

    def wait_for_step(self, step: int) -> None:
        sql = "SELECT 1 FROM steps WHERE objective = 'policy' AND step >= ?"
        self.wait_for(lambda: self.rows(sql, step), f"step {step}", RUN_SECONDS)

    def wait_to_serve(self, engine: str, since: float) -> None:
        """Wait until an engine has proved a version after this moment."""
        sql = "SELECT 1 FROM deliveries WHERE engine = ? AND accepted AND time > ?"
        self.wait_for(lambda: self.rows(sql, engine, since), f"a delivery to {engine}")

    def noticed(self, worker: str, since: float) -> float:
        """Wait until a death of this worker is in the journal. Return the seconds that this took since the event."""
        sql = "SELECT min(time) FROM restarts WHERE process = ? AND time > ? HAVING min(time) IS NOT NULL"
        self.wait_for(lambda: self.rows(sql, worker, since), f"the death of {worker}")
        return float(self.rows(sql, worker, since)[0][0]) - since

    def workers(self, role: str, rank: int) -> dict[str, int]:
        """Return the hosts on which this worker runs, and its process there."""
        found = {}
        for host in self.hosts:
            for pid, words in host.processes().items():
                if WORKER in words and _option(words, "--role") == role and _option(words, "--rank") == str(rank):
                    found[host.name] = pid
        return found

    def interrupt(self) -> dict[str, Any]:
        """Interrupt the run, wait until it has ended in order, and return its summary."""
        os.kill(self.process.pid, signal.SIGINT)
        return self.end(130)

    def end(self, code: int = 0) -> dict[str, Any]:
        """Wait until the run has ended in order. Return its summary."""
        assert self.process.wait(RUN_SECONDS) == code, self.said()[-5000:]
        assert [WORKER in words for host in self.hosts for words in host.processes().values()].count(True) == 0
        return json.loads((self.directory / "summary.json").read_text())  # type: ignore[no-any-return]


def _option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


def check_ledgers(run: PooledRun, summary: dict[str, Any]) -> None:
    """Nothing is lost or trained twice."""
    ledger = summary["ledger"]
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["failed"]
    assert ledger["in_flight"] == ledger["failed"] == 0
    # A run that is interrupted drops what it has begun, and nothing else is dropped.
    reasons = run.rows("SELECT DISTINCT reason FROM groups WHERE state = 'dropped'")
    assert reasons == ([("interrupted",)] if summary["outcome"] == "interrupted" and ledger["dropped"] else [])
    steps = run.rows("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")
    assert steps == [(step,) for step in range(1, summary["steps"] + 1)]
    per_step = run.rows("SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step")
    assert per_step == [(step, 16) for (step,) in steps]
    ids = [version for (version,) in run.rows("SELECT id FROM versions ORDER BY published, id")]
    assert ids == sorted(set(ids))
    assert summary["lag_max"] <= summary["lag_bound"]
