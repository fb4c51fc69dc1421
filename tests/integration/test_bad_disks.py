"""A full disk, a journal that is in use or damaged, a torn checkpoint: one line, and the last good state is used."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, small_settings, worker_pids
from test_mistakes import refused

from headrace.buffer.store import lock_run
from headrace.config import load_config

pytestmark = pytest.mark.slow

Full = Callable[[str, int | None], None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three versions with three checkpoints."""
    directory = tmp_path_factory.mktemp("finished")
    mine = ["run.versions=3", "training.checkpoint_every=1", "evaluate.prompts=1", "rollouts.max_tokens=8"]
    done = headrace("train", str(QUICKSTART), *(p for s in small_settings(directory, *mine) for p in ("--set", s)))
    assert done.returncode == 0, done.stderr
    return directory / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step-*"))


def goes_on(run_dir: Path, versions: int) -> str:
    """Resume up to so many versions; what it said."""
    done = headrace("resume", str(run_dir), "--set", f"run.versions={versions}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["outcome"] == "finished"
    assert summary["ledger"]["trained"] == 4 * versions and summary["ledger"]["in_flight"] == 0
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
        ids = [version for (version,) in db.execute("SELECT id FROM versions ORDER BY rowid")]
    assert steps == list(range(1, versions + 1))
    assert ids == sorted(set(ids))
    return done.stdout + done.stderr


def test_a_run_that_lives_is_not_touched(run_dir: Path) -> None:
    before = (run_dir / "config.toml").read_bytes()
    lock = lock_run(run_dir / "journal.db")
    line = refused("resume", str(run_dir), "--set", "run.versions=9")
    assert line == f"{run_dir / 'journal.db'} is in use by a live run (process {os.getpid()})"
    assert (run_dir / "config.toml").read_bytes() == before
    lock.close()


def test_friction_44_the_loser_of_two_resumes_is_refused_before_it_starts_a_worker(
    run_dir: Path, stop: Callable[..., Path]
) -> None:
    stopped = stop("trainer", "headrace.training.serving:build_trainer", 1, "nobody")
    command = [sys.executable, "-m", "headrace", "resume", str(run_dir), "--set", "run.versions=4"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not stopped.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert stopped.exists()
        line = refused("resume", str(run_dir))
        assert line == f"{run_dir / 'journal.db'} is in use by a live run (process {first.pid})"
    finally:
        first.kill()
        first.wait()


def test_friction_28_a_status_that_cannot_be_written_does_not_end_the_run(run_dir: Path) -> None:
    (run_dir / "status.json.part").mkdir()
    assert "status.json cannot be written: Is a directory; the run goes on" in goes_on(run_dir, 30)


def test_settings_that_are_refused_are_not_kept(run_dir: Path) -> None:
    before = (run_dir / "config.toml").read_bytes()
    more = [part for setting in ("run.versions=4", "model.path=nowhere") for part in ("--set", setting)]
    assert "/nowhere is not a directory" in refused("resume", str(run_dir), *more)
    assert (run_dir / "config.toml").read_bytes() == before


@pytest.mark.parametrize("setting", ["training.optimizer=muon", "lora.rank=4"])
def test_settings_that_the_trainer_refuses_are_not_kept(run_dir: Path, setting: str) -> None:
    before = (run_dir / "config.toml").read_bytes()
    refused("resume", str(run_dir), "--set", "run.versions=4", "--set", setting)
    assert (run_dir / "config.toml").read_bytes() == before
    assert not list(run_dir.glob("config.next.*"))
    goes_on(run_dir, 4)
    assert load_config(run_dir / "config.toml").run.versions == 4


def test_settings_of_a_resume_that_was_killed_before_it_had_started_are_not_kept(
    run_dir: Path, stop: Callable[..., Path]
) -> None:
    before = (run_dir / "config.toml").read_bytes()
    stopped = stop("trainer", "headrace.training.serving:build_trainer", 1, "controller")
    killed = headrace("resume", str(run_dir), "--set", "run.versions=4", "--set", "training.optimizer=muon")
    assert stopped.exists() and killed.returncode == -9
    assert (run_dir / "config.toml").read_bytes() == before
    deadline = time.monotonic() + 30
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    goes_on(run_dir, 4)


@pytest.mark.parametrize("where", ["header", "page"])
def test_a_damaged_journal_is_named_and_nothing_begins(run_dir: Path, where: str) -> None:
    journal = run_dir / "journal.db"
    with sqlite3.connect(journal) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'rollouts'").fetchone()
    content = bytearray(journal.read_bytes())
    start = 0 if where == "header" else (root - 1) * 4096
    content[start : start + 4096] = b"\xa5" * 4096
    journal.write_bytes(content)
    before = checkpoints(run_dir)
    line = refused("resume", str(run_dir))
    assert str(journal) in line
    assert ("is damaged" if where == "page" else "file is not a database") in line
    assert checkpoints(run_dir) == before and journal.read_bytes() == content


def test_a_torn_checkpoint_is_passed_over_for_the_one_before(run_dir: Path) -> None:
    newest = checkpoints(run_dir)[-1] / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    damage = "model.safetensors has other bytes than were written"
    exported = headrace("export", str(run_dir), "--to", "hf")
    assert exported.returncode == 0
    assert f"{newest.parent.name}: {damage}; {checkpoints(run_dir)[-2].name} is taken" in exported.stderr
    named = refused("export", str(run_dir), "--to", "hf", "--checkpoint", newest.parent.name)
    assert named == f"--checkpoint {newest.parent.name}: {damage}"
    said = goes_on(run_dir, 4)
    assert f"{newest.parent.name}: model.safetensors has other bytes than were written; it is kept as damaged-" in said
    assert "config was: versions = 3" in said and "config now: versions = 4" in said
    with sqlite3.connect(run_dir / "journal.db") as db:
        ((after, until),) = db.execute("SELECT from_step, to_step FROM restarts").fetchall()
        by_step = db.execute("SELECT step, COUNT(DISTINCT digest) FROM versions GROUP BY step").fetchall()
    assert (after, until) == (2, 3), "its step is trained again from the journal"
    assert all(digests == 1 for _, digests in by_step), "to the same weights"


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file: it stays as long as it was."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def test_friction_30_a_flipped_bit_in_the_weights_is_not_trained_on(run_dir: Path) -> None:
    newest = checkpoints(run_dir)[-1]
    flip(newest / "model.safetensors")
    line = refused("export", str(run_dir), "--to", "hf")
    assert line.startswith(f"{newest} is damaged: model.safetensors has other bytes than were written")
    assert not (run_dir / "export-hf").exists()
    said = goes_on(run_dir, 4)
    assert f"{newest.name}: model.safetensors has other bytes than were written; it is kept as damaged-" in said
    assert (run_dir / "checkpoints" / f"damaged-{newest.name}").is_dir()
    with sqlite3.connect(run_dir / "journal.db") as db:
        by_step = db.execute("SELECT step, COUNT(DISTINCT digest) FROM versions GROUP BY step").fetchall()
    assert all(digests == 1 for _, digests in by_step), "a step has the same weights after the resume"


def test_friction_30_an_export_that_has_changed_is_not_trained_from(run_dir: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert headrace("export", str(run_dir), "--to", "hf", "--out", str(model)).returncode == 0
    flip(model / "model.safetensors")
    settings = small_settings(tmp_path / "new", f"model.path={model}", "model.weights=load")
    line = refused("train", str(QUICKSTART), *(part for s in settings for part in ("--set", s)))
    assert line == f"[model] path: {model} is damaged: model.safetensors has other bytes than were written"


def test_friction_34_a_checkpoint_that_the_journal_does_not_know_is_kept(run_dir: Path) -> None:
    newest = checkpoints(run_dir)[-1]
    with sqlite3.connect(run_dir / "journal.db") as db:
        db.execute("DELETE FROM steps WHERE step = 3")
        db.execute("DELETE FROM versions WHERE step = 3")
        db.execute("UPDATE groups SET state = 'in_flight', step = NULL, ended = NULL, checksum = NULL WHERE step = 3")
        db.execute("UPDATE rollouts SET state = 'in_flight', step = NULL, ended = NULL, checksum = NULL WHERE step = 3")
    said = goes_on(run_dir, 3)
    assert f"{newest.name}: it is of step 3, and the journal ends at step 2; it is kept as ahead-{newest.name}" in said
    kept = run_dir / "checkpoints" / f"ahead-{newest.name}"
    assert (kept / "model.safetensors").is_file() and (run_dir / "checkpoints" / newest.name).is_dir()


def test_friction_46_no_room_for_a_checkpoint(run_dir: Path, full: Full) -> None:
    newest = checkpoints(run_dir)[-1]
    sizes = [(newest / name).stat().st_size for name in ("model.safetensors", "trainer/optimizer.safetensors")]
    full("trainer", sum(sizes) // 2)
    done = headrace("resume", str(run_dir), "--set", "run.versions=5")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    assert f"{run_dir / 'checkpoints'} cannot be written: " in line and "File too large" in line
    assert line.endswith("older checkpoints are whole")
    assert "started again" not in done.stdout + done.stderr, "the run ends"
    full("trainer", None)
    goes_on(run_dir, 5)


def test_friction_46_no_room_for_a_checkpoint_and_its_log(run_dir: Path, full: Full) -> None:
    shutil.rmtree(run_dir / "logs", ignore_errors=True)
    (run_dir / "logs").mkdir()
    (run_dir / "logs/trainer-0.log").symlink_to("/dev/full")
    newest = checkpoints(run_dir)[-1]
    sizes = [(newest / name).stat().st_size for name in ("model.safetensors", "trainer/optimizer.safetensors")]
    full("trainer", sum(sizes) // 2)
    done = headrace("resume", str(run_dir), "--set", "run.versions=5")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    assert f"{run_dir / 'checkpoints'} cannot be written: " in line
    assert "started again" not in done.stdout + done.stderr, "the run ends"
    full("trainer", None)
    (run_dir / "logs/trainer-0.log").unlink()
    goes_on(run_dir, 5)


def test_friction_46_no_room_for_the_journal(run_dir: Path, full: Full) -> None:
    full("controller", 300_000)
    done = headrace("resume", str(run_dir), "--set", "run.versions=60")
    assert done.returncode == 2, "as for a checkpoint"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("headrace: ")]
    assert str(run_dir) in line and "cannot be written: " in line
    assert "Traceback" not in done.stderr
    assert "started again" not in done.stdout + done.stderr, "the run ends"
    full("controller", None)
    with sqlite3.connect(run_dir / "journal.db") as db:
        (reached,) = db.execute("SELECT MAX(step) FROM steps").fetchone()
    assert 3 < reached < 60
    goes_on(run_dir, reached + 1)


def test_friction_43_an_empty_journal_is_refused_before_any_worker_starts(run_dir: Path) -> None:
    (run_dir / "journal.db").write_bytes(b"")
    log = sorted((run_dir / "logs").glob("*")) if (run_dir / "logs").is_dir() else []
    before, saved = {path: path.stat().st_mtime_ns for path in log}, checkpoints(run_dir)
    line = refused("resume", str(run_dir))
    assert f"{run_dir / 'journal.db'} is damaged (it is empty" in line
    assert before == {path: path.stat().st_mtime_ns for path in log}, "no worker has written a line"
    assert (run_dir / "journal.db").read_bytes() == b"" and checkpoints(run_dir) == saved


def test_friction_43_deleted_segments_are_named_when_the_run_is_resumed(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "segments")
    said = " ".join(goes_on(run_dir, 4).split())
    assert "000001.seg is missing: the tokens of groups 0, 1, 2" in said


def test_friction_43_lost_commits_are_named_and_the_run_goes_on_from_the_others(run_dir: Path) -> None:
    with sqlite3.connect(run_dir / "journal.db") as db:  # as it was before its last step
        db.execute("DELETE FROM steps WHERE step = 3")
        db.execute("DELETE FROM versions WHERE step = 3")
        for table in ("groups", "rollouts"):
            db.execute(f"UPDATE {table} SET state = 'in_flight', step = NULL, checksum = NULL WHERE step = 3")
        db.execute("UPDATE groups SET ended = NULL WHERE state = 'in_flight'")
    db.close()
    said = " ".join(goes_on(run_dir, 4).split())
    assert "ends with step 2, but step 3 was reported: its last commits are lost" in said


@pytest.mark.parametrize("content", [b"\x00\xffgarbage\n", b'[\n{"ph":"M","name":"thread_name","pid":7,"args":{}},\n'])
def test_friction_38_a_damaged_timeline_does_not_block_a_resume(run_dir: Path, content: bytes) -> None:
    (run_dir / "timeline.json").write_bytes(content)
    (run_dir / "metrics.jsonl").write_bytes(content)
    (run_dir / "summary.json").unlink()
    (run_dir / "summary.json").mkdir()
    said = " ".join(goes_on(run_dir, 4).split())
    assert "timeline.json is damaged" in said and "it is kept as damaged-timeline.json, and a new one begins" in said
    assert (run_dir / "damaged-timeline.json").read_bytes() == content and (run_dir / "damaged-summary.json").is_dir()
    assert json.loads((run_dir / "timeline.json").read_bytes())[0]["name"] == "run started"
