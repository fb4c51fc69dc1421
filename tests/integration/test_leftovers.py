"""Nothing stays on the machine: not after a normal end or a Ctrl-C, nor after kill -9 once the next run has begun."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import QUICKSTART, small_settings, start, worker_pids
from test_deaths import wait_until_training

from headrace.buffer.reader import open_readonly
from headrace.delivery.transports.tcp_wire import KEYS

pytestmark = pytest.mark.slow


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the run puts what is temporary. A short name: it holds sockets."""
    path = Path(tempfile.mkdtemp(prefix="left-"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # torch's own, and meant to stay
    yield path
    shutil.rmtree(path)


class Machine:
    """What a run has on the machine, beside its run directory."""

    def __init__(self, run_dir: Path, temporary: Path) -> None:
        self._run_dir, self._temporary = run_dir, temporary
        self._sockets: set[str] = set()

    def look(self, controller: int) -> None:
        """Remember the sockets that listen now."""
        for pid in (controller, *worker_pids(self._run_dir).values()):
            self._sockets |= _sockets_of(pid) & _listening()

    def sees_sockets(self) -> bool:
        return bool(self._sockets)

    def left(self) -> list[str]:
        segments = [path.name for path in Path("/dev/shm").glob(f"headrace-{self._run_dir.name}-*")]
        files = [str(path) for path in self._temporary.rglob("*")]
        run = [name for name in ("weights", KEYS) if (self._run_dir / name).exists()]
        return segments + files + run + list(worker_pids(self._run_dir)) + sorted(self._sockets & _listening())


def _sockets_of(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _listening() -> set[str]:
    """The inodes of all sockets that listen: TCP of both kinds, and named ones."""
    found = set()
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        found |= {row[9] for row in rows if row[3] == "0A"}
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return found | {row[6] for row in rows if len(row) > 7}


def ended(run: subprocess.Popen[str]) -> str:
    try:
        return run.communicate(timeout=200)[1]
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("transport", "victim", "ending"),
    [
        ("shm", "controller", "normal end"),
        ("file", "controller", "Ctrl-C"),
        ("tcp", "trainer-0", "Ctrl-C"),
        ("nccl", "engine-0", "normal end"),
    ],
)
def test_what_a_killed_run_leaves_is_gone_with_the_next(
    tmp_path: Path, temporary: Path, transport: str, victim: str, ending: str
) -> None:
    name = f"left-{os.getpid()}-{transport}"
    settings = [
        *small_settings(tmp_path),
        f"run.name={name}",
        "run.versions=500",
        "warm_start.steps=0",
        "rollouts.group_size=2",
        "rollouts.max_tokens=4",
        "buffer.groups=2",
        "training.checkpoint_every=1",
        "evaluate.prompts=1",
        f"delivery.transport={transport}",
        "pipeline.restarts=0",
    ]
    run_dir = tmp_path / name
    machine = Machine(run_dir, temporary)
    first = start("train", str(QUICKSTART), *(part for setting in settings for part in ("--set", setting)))
    wait_until_training(run_dir, 3)
    machine.look(first.pid)
    assert machine.sees_sockets()
    assert machine.left(), "a run that goes on has things on the machine"
    pids = {"controller": first.pid, **worker_pids(run_dir)}
    os.kill(pids[victim], signal.SIGKILL)
    ended(first)
    deadline = time.monotonic() + 30
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    if victim == "controller":
        assert machine.left(), "nobody was left to clean up"
    else:
        assert machine.left() == []

    steps = _steps(run_dir)
    second = start("resume", str(run_dir), "--set", f"run.versions={steps + (500 if ending == 'Ctrl-C' else 2)}")
    if ending == "Ctrl-C":
        wait_until_training(run_dir, steps + 2)
        machine.look(second.pid)
        second.send_signal(signal.SIGINT)
    stderr = ended(second)
    assert second.returncode == (130 if ending == "Ctrl-C" else 0), stderr
    assert machine.left() == []


def _steps(run_dir: Path) -> int:
    """The steps in the journal, of which the newest checkpoint may not hold the last ones."""
    with open_readonly(run_dir / "journal.db") as journal:
        return journal.last_step()
