"""The sbatch script of `headrace launch` on three hosts: Ray starts on all of them, and the run on the first."""

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

import pytest
from hosts import ROOT, Host, Hosts
from slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUICKSTART = "examples/quickstart/quickstart.toml"
VERSIONS = 30
SECONDS = 240.0
WORKER = "headrace.cluster.worker_main"
ENVIRONMENT = {"PYTHONPATH": str(ROOT / "src")}
SMALL = (
    "warm_start.steps=2", "engine.count=2", "evaluate.prompts=8", "evaluate.every=0", "buffer.groups=2",
    "rollouts.group_size=2", "rollouts.max_tokens=8", "run.name=job", f"run.versions={VERSIONS}",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        yield made


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that all hosts see, as they do not see `/tmp`."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix="sbatch-") as made:
        yield Path(made)


class BatchJob:
    """The script of a job, on the first host."""

    def __init__(self, slurm: Slurm, script: Path, hosts: list[Host]) -> None:
        self._hosts = hosts
        self._output = script.with_suffix(".txt")
        self.process = slurm.batch(script, self._output, ENVIRONMENT)

    def wait_for(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not holds():
            assert self.process.poll() is None, f"the job ended before {what}\n{self.said()}"
            assert time.monotonic() < deadline, f"{what} did not come\n{self.said()}"
            time.sleep(0.1)

    def end(self) -> int:
        """Wait until the script has ended and no process of the job is left. Return its exit code."""
        code, deadline = self.process.wait(SECONDS), time.monotonic() + SECONDS
        while left := {host.name: found for host in self._hosts if (found := host.processes())}:
            assert time.monotonic() < deadline, f"{left} are left\n{self.said()}"
            time.sleep(0.1)
        return int(code)

    def said(self) -> str:
        return self._output.read_text(errors="replace")[-5000:]


def steps(run_dir: Path) -> int:
    if not (run_dir / "journal.db").is_file():
        return 0
    with closing(sqlite3.connect(run_dir / "journal.db", timeout=30)) as db:
        try:
            return int(db.execute("SELECT count(*) FROM steps WHERE objective = 'policy'").fetchone()[0])
        except sqlite3.OperationalError:  # The tables are not there yet.
            return 0


def workers(host: Host) -> int:
    return sum(WORKER in words for words in host.processes().values())


def tokens() -> set[Path]:
    return set(ROOT.glob(".ray-token-*"))


def test_a_job_trains_on_its_nodes_ends_in_order_and_goes_on(hosts: list[Host], directory: Path) -> None:
    script, run_dir = directory / "job.sh", directory / "job"
    settings = [word for setting in (*SMALL, f"run.directory={directory}") for word in ("--set", setting)]
    launch = [sys.executable, "-m", "headrace", "launch", QUICKSTART, "--slurm", "--nodes=3", "--gpus-per-node=0"]
    words = [*launch, *settings, "--output", str(script)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=True, timeout=SECONDS)
    earlier = tokens()  # Of jobs that were killed.
    with Slurm(hosts, directory) as slurm:
        job = BatchJob(slurm, script, hosts)
        job.wait_for(lambda: [workers(host) for host in hosts] == [1, 1, 1], "a worker on every host")
        [token] = tokens() - earlier
        assert token.stat().st_mode & 0o777 == 0o600
        commands = [" ".join(words) for host in hosts for words in host.processes().values()]
        assert not [command for command in commands if token.read_text() in command]

        # `scancel` and a preemption send this signal.
        job.wait_for(lambda: steps(run_dir) >= 2, "the second step")
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end() == 130, job.said()
        assert tokens() == earlier
        assert 2 <= steps(run_dir) < VERSIONS

        job = BatchJob(slurm, script, hosts)
        assert job.end() == 0, job.said()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["deliveries_rejected"]) == ("finished", VERSIONS, 0)
    assert not (directory / "scontrol.txt").exists()  # Nothing was requeued.
