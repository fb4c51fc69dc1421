"""What is said and written of a step that was skipped, and of a run that does not learn."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.algorithms.assemble import assemble_demonstrations
from headrace.buffer.journal import Journal
from headrace.buffer.reader import open_readonly
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


def made(folder: Path, notes: Notes) -> Recorder:
    journal = Journal(folder / "journal.db")
    return Recorder(
        Outputs(journal, MetricsLog(folder / "metrics.jsonl"), notes, RunClock.now()), Window(1, 0, 1, None),
        versions_total=1, before=journal.recover(step=0, publish_every=1),
    )  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path, notes: Notes) -> Iterator[Recorder]:
    recorder = made(tmp_path, notes)
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
    loss: float = 0.0,
    committed: bool = True,
) -> None:
    pair = (np.arange(3, dtype=np.int32), np.arange(answer, dtype=np.int32))
    batch = assemble_demonstrations([pair], step=number, version=0)
    report = StepReport(
        step=number, loss=loss, grad_norm=grad_norm, learning_rate=0.1, tokens=1, micro_batches=1, seconds=0.1,
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
    step(recorder, 4, 2, float("nan"), 3, skipped=True, loss=float("nan"))
    step(recorder, 5, 2, 0.5, 3, skipped=False)
    assert notes.lines == [
        "step 2 was skipped: its gradient is not finite",
        "step 3 was skipped: its batch has no token to train",
        "step 4 was skipped: its loss is not finite",
    ]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [False, True, True, True, False]
    assert [record["skipped_steps"] for record in records] == [0, 1, 2, 3, 3]


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


def policy_step(recorder: Recorder, number: int) -> None:
    """A step in which half of the answers could be trained on, and the policy moved too far."""
    pair = (np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32))
    demonstration = assemble_demonstrations([pair], step=number, version=0)
    batch = msgspec.structs.replace(demonstration, objective="policy")
    report = StepReport(
        step=number, loss=0.0, grad_norm=1.0, learning_rate=0.1, tokens=1, micro_batches=1, seconds=0.1,
        metrics={"kl_k3": 0.5},
    )  # fmt: skip
    recorder.step_ended(batch, [], report)


def test_advice_of_the_last_step_is_recorded_everywhere_and_not_repeated(tmp_path: Path, notes: Notes) -> None:
    recorder = made(tmp_path, notes)
    for number in range(1, 6):
        policy_step(recorder, number)
    recorder.close("finished")
    [line] = notes.lines
    assert line.startswith("advice: the KL divergence from the policy that sampled was 0.5 in the last 5 steps")
    *steps, advice = read_metrics(tmp_path / "metrics.jsonl")
    assert (advice["kind"], advice["cause"], advice["step"]) == ("advice", "learning_rate", 5)
    with open_readonly(tmp_path / "journal.db") as journal:
        assert journal.meta()["advice learning_rate"] == {key: advice[key] for key in ("cause", "step", "line")}
        assert [curves["kl_k3"] for curves in journal.step_curves()] == [0.5] * 5
    (tmp_path / "second").mkdir()
    second = made(tmp_path / "second", again := Notes())
    second.remember([*steps, {"kind": "advice"}, {"kind": "step", "objective": "policy", "kl_k3": "damaged"}])
    policy_step(second, 6)
    second.close("finished")
    assert again.lines == []
