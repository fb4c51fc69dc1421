"""Whole runs over each transport: every version is proved on every engine, and nothing stays behind."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from runs import segments_left, small_config, worker_pids

from headrace.errors import HeadraceError
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run


class Notes(NoProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("transport", "why"), [("file", '[delivery] transport = "file"'), ("tcp", "tcp"), ("auto", "one host")]
)
def test_every_delivery_is_proved(tmp_path: Path, transport: str, why: str) -> None:
    before = segments_left()
    notes = Notes()
    settings = ["run.versions=3", "evaluate.prompts=4", f"delivery.transport={transport}", "engine.count=2"]
    outcome = start_run(small_config(tmp_path, *settings), notes)
    assert outcome.outcome == "finished"
    with sqlite3.connect(outcome.run_dir.journal) as db:
        deliveries = db.execute(
            "SELECT engine, version, accepted, staged_digest, live_digest FROM deliveries"
        ).fetchall()
        digests = dict(db.execute("SELECT id, digest FROM versions"))
    assert sorted((engine, version) for engine, version, *_ in deliveries) == [
        (f"engine-{rank}", version) for rank in range(2) for version in range(4)
    ]
    assert all(accepted for _, _, accepted, *_ in deliveries)
    assert all(staged == live == digests[version] for _, version, _, staged, live in deliveries)
    assert len(set(digests.values())) > 1
    (line,) = [line for line in notes.lines if line.startswith("weights travel by ")]
    assert why in line
    assert worker_pids(outcome.run_dir.path) == {}
    assert not {name for name in segments_left() - before if "-run-" in name}
    assert not (outcome.run_dir.path / "weights").exists()
    assert not (outcome.run_dir.path / "delivery.keys").exists()


def test_a_version_that_cannot_be_written_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    blocked = tmp_path / "shared" / "run" / "version-00000001.safetensors.partial"
    blocked.mkdir(parents=True)
    settings = ["run.versions=3", "evaluate.prompts=0", "delivery.transport=file"]
    settings.append(f"delivery.directory={tmp_path / 'shared'}")
    with pytest.raises(HeadraceError, match=r"cannot be written: Is a directory|trainer-0 died"):
        start_run(small_config(tmp_path, *settings), NoProgress())
    log = (tmp_path / "run" / "logs" / "trainer-0.log").read_text()
    assert "version-00000001.safetensors cannot be written: Is a directory" in log
    assert list((tmp_path / "shared" / "run").iterdir()) == [blocked]
