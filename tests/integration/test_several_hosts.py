"""A run whose workers have no run directory: files come over the link, logs go back, and nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, small_settings, start
from test_deaths import wait_until_training

from headrace.training.checkpoints.base import damage_of

pytestmark = pytest.mark.slow

LAUNCHER = Path(__file__).with_name("hosts_on_loopback.py")


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hosts-"))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("HEADRACE_TEST_HOSTS", "3")
    yield path
    shutil.rmtree(path)


def settings(tmp_path: Path, *more: str) -> list[str]:
    every = small_settings(tmp_path, f"pipeline.launcher={LAUNCHER}:LoopbackHosts", "engine.count=2", *more)
    return [part for setting in every for part in ("--set", setting)]


def _processes(word: str) -> dict[int, list[str]]:
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "headrace.cluster.worker_main" in command and word in command:
            found[int(process.name)] = command
    return found


def _address(run_dir: Path) -> str:
    """Return the address of the run's hub, from the trainer's command line."""
    commands = list(_processes(str(run_dir)).values())
    return commands[0][commands[0].index("--address") + 1]


def test_engines_on_other_hosts_are_started_killed_and_replaced(tmp_path: Path, temporary: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "run.versions=40", "training.checkpoint_every=1"))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 3)
    workers = _processes(_address(run_dir))
    engines = {pid: command for pid, command in workers.items() if "engine" in command}
    assert len(engines) == 2
    assert all("--run" not in command for command in engines.values())
    assert {command[command.index("--own-address") + 1] for command in engines.values()} == {"127.0.0.2", "127.0.0.3"}
    host_dirs = sorted(path.relative_to(temporary).parts[0] for path in temporary.glob("host*/headrace-host-*"))
    assert host_dirs == ["host2", "host3"]
    os.kill(next(iter(engines)), signal.SIGKILL)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 40
    with sqlite3.connect(run_dir / "journal.db") as db:
        assert db.execute("SELECT count(*) FROM restarts WHERE process LIKE 'engine-%'").fetchone() == (1,)
    for rank in range(2):
        assert (run_dir / "logs" / f"engine-{rank}.log").is_file()
    assert not list(temporary.glob("host*/headrace-host-*"))


def test_a_trainer_on_another_host_sends_its_checkpoints_and_goes_on_from_them(tmp_path: Path, temporary: Path) -> None:
    """The trainer has no disk that the controller sees: its checkpoints travel over the link, in both directions."""
    # An engine of the same host keeps there what the trainer has left.
    away = ('cluster.hosts=["host2"]', "run.versions=30", "training.checkpoint_every=2", "engine.count=1")
    run = start("train", str(QUICKSTART), *settings(tmp_path, *away))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 6)
    trainers = [pid for pid, command in _processes("trainer").items() if "127.0.0.2" in command]
    assert len(trainers) == 1
    os.kill(trainers[0], signal.SIGKILL)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    kept = sorted((run_dir / "checkpoints").glob("step-*"))
    assert [path.name for path in kept] == ["step-00000030", "step-00000032"]
    assert all(damage_of(path) == "" for path in kept)
    with sqlite3.connect(run_dir / "journal.db") as db:
        ((again, until),) = db.execute("SELECT from_step, to_step FROM restarts WHERE process = 'trainer-0'")
        assert 0 < again <= until
    assert not list(temporary.glob("host*/headrace-host-*"))


def test_a_trainer_on_another_host_goes_on_from_a_url(tmp_path: Path, temporary: Path) -> None:
    """The hosts share nothing but the URL, and the controller's host fetches a checkpoint only when it needs one."""
    bucket, run_dir = tmp_path / "bucket", tmp_path / "run"
    away = ('cluster.hosts=["host2","host3"]', "run.versions=30", "training.checkpoint_every=2", "engine.count=1")
    run = start("train", str(QUICKSTART), *settings(tmp_path, *away, f"training.checkpoint_directory=file://{bucket}"))
    wait_until_training(run_dir, 6)
    trainers = [pid for pid, command in _processes("trainer").items() if "127.0.0.2" in command]
    assert len(trainers) == 1
    os.kill(trainers[0], signal.SIGKILL)
    _, stderr = run.communicate(timeout=300)
    assert run.returncode == 0, stderr
    kept = sorted((bucket / "run").iterdir())
    assert [path.name for path in kept] == ["step-00000030", "step-00000032"]
    assert all(damage_of(path) == "" for path in kept)
    with sqlite3.connect(run_dir / "journal.db") as db:
        ((again, until),) = db.execute("SELECT from_step, to_step FROM restarts WHERE process = 'trainer-0'")
        assert 0 < again <= until
    assert not list(temporary.glob("host*/headrace-host-*"))
    assert not (run_dir / "checkpoints").exists()
    exported = headrace("export", str(run_dir), "--to", "hf")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.startswith("step-00000032 as hf in ")
    model = Path("model.safetensors")
    assert (run_dir / "export-hf" / model).read_bytes() == (kept[1] / model).read_bytes()
    shutil.rmtree(run_dir / "checkpoints")
    audited = headrace("audit", str(run_dir), "--json")
    assert audited.returncode == 0, audited.stderr
    assert json.loads(audited.stdout)["passed"]
    shutil.rmtree(run_dir / "checkpoints")
    resumed = headrace("resume", str(run_dir), "--set", "run.versions=31", "--set", 'cluster.hosts=["host1","host3"]')
    assert resumed.returncode == 0, resumed.stderr
    assert [path.name for path in sorted((bucket / "run").iterdir())] == ["step-00000032", "step-00000033"]
    bucket.rename(tmp_path / "gone")
    bucket.write_text("a store that cannot be read")
    shutil.rmtree(run_dir / "checkpoints")
    refused = headrace("export", str(run_dir), "--to", "hf", "--out", str(tmp_path / "model"))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"headrace: [training] checkpoint_directory: file://{bucket}/run cannot be read: ")
    assert refused.stderr.count("\n") == 1


def test_an_engine_joins_on_another_host_and_leaves(tmp_path: Path, temporary: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "run.versions=5000", "observe.display=plain"))
    run_dir = tmp_path / "run"
    try:
        wait_until_training(run_dir, 2)
        assert headrace("scale", str(run_dir), "--engines", "3").stdout == "engines 2 -> 3\n"
        await_deliveries(run_dir, "engine-2", 2)
        assert headrace("scale", str(run_dir), "--engines", "1").stdout == "engines 3 -> 1\n"
        deadline = time.monotonic() + 100
        while len(engines := _engines(_address(run_dir))) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(engines) == 1
        assert headrace("scale", str(run_dir), "--engines", "2").stdout == "engines 1 -> 2\n"
        await_deliveries(run_dir, "engine-1", 1 + len(deliveries_of(run_dir, "engine-1")))
    finally:
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=200)
    assert run.returncode == 130, stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["ledger"]["failed"] == 0 and summary["ledger_rollouts"]["failed"] == 0
    assert "engine-2 has joined" in stdout and "engine-2 has left" in stdout
    with sqlite3.connect(run_dir / "journal.db") as db:
        assert db.execute("SELECT * FROM restarts").fetchall() == []
    assert not list(temporary.glob("host*/headrace-host-*"))


def _engines(address: str) -> list[list[str]]:
    return [command for command in _processes(address).values() if "engine" in command]


def deliveries_of(run_dir: Path, engine: str) -> list[tuple[int]]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute("SELECT version FROM deliveries WHERE accepted AND engine = ?", (engine,)).fetchall()


def await_deliveries(run_dir: Path, engine: str, count: int) -> None:
    deadline = time.monotonic() + 150
    while len(deliveries_of(run_dir, engine)) < count:
        assert time.monotonic() < deadline, f"{engine} has not proved {count} versions in time"
        time.sleep(0.1)
