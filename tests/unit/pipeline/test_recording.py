"""What is said and written of a step that was skipped."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.algorithms.assemble import assemble_demonstrations
from headrace.buffer.journal import Journal
from headrace.buffer.window import Window
from headrace.observe.metrics import MetricsLog, read_metrics
from headrace.observe.progress import NoProgress
from headrace.observe.spans import RunClock
from headrace.pipeline.recording import Outputs, Recorder
from headrace.training.base import StepReport


class Notes(NoProgress):
    """Keeps the lines for the people who watch."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def recorder(tmp_path: Path, notes: Notes) -> Iterator[Recorder]:
    journal = Journal(tmp_path / "journal.db")
    recorder = Recorder(
        Outputs(journal, MetricsLog(tmp_path / "metrics.jsonl"), notes, RunClock.now()), Window(1, 0, 1, None),
        versions_total=1, before=journal.recover(step=0, publish_every=1),
    )  # fmt: skip
    yield recorder
    recorder.close("finished")


def step(
    recorder: Recorder,
    number: int,
    answer: int,
    grad_norm: float,
    skipped_steps: int,
    *,
    skipped: bool,
    committed: bool = True,
) -> None:
    pair = (np.arange(3, dtype=np.int32), np.arange(answer, dtype=np.int32))
    batch = assemble_demonstrations([pair], step=number, version=0)
    report = StepReport(
        step=number, loss=0.0, grad_norm=grad_norm, learning_rate=0.1, tokens=1, micro_batches=1, seconds=0.1,
        skipped=skipped, skipped_steps=skipped_steps,
    )  # fmt: skip
    recorder.step_ended(batch, [], report)
    if committed:
        recorder.journal.flush()
        recorder.show()


def test_a_skipped_step_is_said_with_its_reason_and_counted(tmp_path: Path, recorder: Recorder, notes: Notes) -> None:
    step(recorder, 1, 2, 0.5, 0, skipped=False)
    step(recorder, 2, 2, float("nan"), 1, skipped=True)
    step(recorder, 3, 0, 0.0, 2, skipped=True)
    step(recorder, 4, 2, 0.5, 2, skipped=False)
    assert notes.lines == [
        "step 2 was skipped: its gradient is not finite",
        "step 3 was skipped: its batch has no token to train",
    ]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [False, True, True, False]
    assert [record["skipped_steps"] for record in records] == [0, 1, 2, 2]


def test_friction_34_a_step_is_reported_only_when_it_is_committed(tmp_path: Path, recorder: Recorder) -> None:
    recorder.journal.flush()
    other = sqlite3.connect(tmp_path / "journal.db")
    other.execute("BEGIN IMMEDIATE")  # nothing can be committed now
    step(recorder, 1, 2, 0.5, 0, skipped=False, committed=False)
    recorder.show()
    assert read_metrics(tmp_path / "metrics.jsonl") == [] and recorder.shown.step != 1
    recorder.version_served(1)
    assert recorder.shown.version != 1, "a version is shown after its step"
    other.close()
    recorder.journal.flush()
    recorder.show()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    assert (recorder.shown.step, recorder.shown.version) == (1, 1)
