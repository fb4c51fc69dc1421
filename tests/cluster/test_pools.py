"""Real runs on three hosts under Ray: the trainer on one, engines on the others, and all that may happen to them."""

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

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

QUICKSTART = "examples/quickstart/quickstart.toml"
VERSIONS = 100
"""Fewer than those of the quickstart, for time. They are enough for it to learn."""
RUN_SECONDS = 600.0
EVENT_SECONDS = 150.0
"""The longest that a test waits for something to happen in a run."""
NOTICE_SECONDS = 15.0
"""In so many seconds, the run must have noticed that a worker is dead."""
AWAY_SECONDS = 60.0
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


def test_hosts_and_processes_fail_and_come_back(cluster: RayCluster, hosts: list[Host], runs: Path) -> None:
    settings = ["engine.count=2", "run.versions=5000", "training.checkpoint_every=10", "pipeline.restarts=10"]
    settings += ["warm_start.steps=20", "evaluate.every=0", "evaluate.prompts=50"]
    run = PooledRun(cluster, hosts, runs, *settings)
    _, second, third = hosts
    run.wait_for_step(3)

    # A worker is killed.
    killed = time.time()
    os.kill(run.workers("engine", 0)["host2"], signal.SIGKILL)
    assert run.noticed("engine-0", killed) < NOTICE_SECONDS
    run.wait_to_serve("engine-0", killed)

    # A raylet is killed, and started again as systemd would. Its worker ends with it.
    killed = time.time()
    cluster.kill_raylet(second)
    assert run.noticed("engine-0", killed) < NOTICE_SECONDS
    run.wait_to_serve("engine-0", killed)

    # The link of a host is cut for a minute. The old process goes on there, and is not let in again.
    cut = time.time()
    third.cut()
    assert run.noticed("engine-1", cut) < NOTICE_SECONDS
    time.sleep(max(0.0, cut + AWAY_SECONDS - time.time()))
    healed = time.time()
    third.heal()
    run.wait_to_serve("engine-1", healed)

    # An engine stands still for a minute, and so does everything on its host that could end it. When it goes on, it
    # ends itself: it has heard nothing for long, or is refused, because a newer one has its place. Its parent does not
    # collect it, so the system keeps its exit code.
    (old,) = run.workers("engine", 1).values()
    stopped, still = time.time(), list(third.processes())
    for pid in still:
        os.kill(pid, signal.SIGSTOP)
    assert run.noticed("engine-1", stopped) < NOTICE_SECONDS
    time.sleep(max(0.0, stopped + AWAY_SECONDS - time.time()))
    os.kill(old, signal.SIGCONT)
    run.wait_for(lambda: state(old) == "Z", "the end of the engine that was replaced")
    assert exit_code(old) == EXIT_ORPHAN
    returned = time.time()
    for pid in still:
        os.kill(pid, signal.SIGCONT)
    run.wait_to_serve("engine-1", returned)

    # Every engine has the newest versions, and the run ends in order.
    summary = run.interrupt()
    check_ledgers(run, summary)
    sql = "SELECT max(version) FROM deliveries WHERE engine = ? AND accepted"
    newest = [run.rows(sql, engine)[0][0] for engine in ("engine-0", "engine-1")]
    assert abs(newest[0] - newest[1]) <= 1, newest


EXIT_ORPHAN = 3
"""The exit code of a worker that was refused, or has lost its controller."""


def state(pid: int) -> str:
    return _stat(pid)[0]


def exit_code(pid: int) -> int:
    """Return the exit code of a process that has ended and was not collected yet."""
    return os.waitstatus_to_exitcode(int(_stat(pid)[-1]))


def _stat(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` after the name, from the state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


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
