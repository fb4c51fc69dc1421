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


def wait_for(holds: Callable[[], object], what: str, job: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert job.poll() is None, f"the job ended before {what}\n{output.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"{what} did not come\n{output.read_text()[-5000:]}"
        time.sleep(0.1)


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


def tokens() -> list[Path]:
    return list(ROOT.glob(".ray-token-*"))


def test_a_job_trains_on_its_nodes_ends_in_order_and_goes_on(hosts: list[Host], directory: Path) -> None:
    script, output, run_dir = directory / "job.sh", directory / "output.txt", directory / "job"
    settings = [word for setting in (*SMALL, f"run.directory={directory}") for word in ("--set", setting)]
    launch = [sys.executable, "-m", "headrace", "launch", QUICKSTART, "--slurm", "--nodes=3", "--gpus-per-node=0"]
    env = {"PYTHONPATH": str(ROOT / "src")}
    subprocess.run([*launch, *settings, "--output", str(script)], cwd=ROOT, env={**os.environ, **env}, check=True)
    with Slurm(hosts, directory) as slurm:
        job = slurm.batch(script, output, env)
        wait_for(lambda: all(map(workers, hosts)), "a worker on every host", job, output)
        assert [workers(host) for host in hosts] == [1, 1, 1], output.read_text()[-5000:]
        [token] = tokens()
        assert token.stat().st_mode & 0o777 == 0o600
        commands = [" ".join(words) for host in hosts for words in host.processes().values()]
        assert not [command for command in commands if token.read_text() in command]

        # `scancel` and a preemption send this signal.
        wait_for(lambda: steps(run_dir) >= 2, "the second step", job, output)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(SECONDS) == 130, output.read_text()[-5000:]
        assert {host.name: host.processes() for host in hosts} == {"host1": {}, "host2": {}, "host3": {}}
        assert tokens() == []
        assert 2 <= steps(run_dir) < VERSIONS

        job = slurm.batch(script, output, env)
        assert job.wait(SECONDS) == 0, output.read_text()[-5000:]
        assert {host.name: host.processes() for host in hosts} == {"host1": {}, "host2": {}, "host3": {}}
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["deliveries_rejected"]) == ("finished", VERSIONS, 0)
    assert not (directory / "scontrol.txt").exists()  # Nothing was requeued.
