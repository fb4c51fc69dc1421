"""The journal's reader: the only place that reads it, one moment for all answers, and columns by their names."""

from __future__ import annotations

import ast
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.buffer.journal import Journal, open_readonly
from headrace.errors import DataError
from headrace.observe.records import DeliveryRecord, EvaluationRecord, SampleRecord, StepRecord
from headrace.types import Group, Prompt, Rollout, Trace, Version

SOURCE = Path(headrace.__file__).parent


def rollout(rollout_id: str, index: int) -> Rollout:
    trace = Trace(
        token_ids=np.arange(3, dtype=np.int32),
        trained=np.array([False, True, True]),
        logprobs=np.array([0, -1, -1], np.float32),
        versions=np.array([-1, 0, 0], np.int32),
    )
    return Rollout(id=rollout_id, index=index, traces=[trace], ending="finished", reward=1.0)


def write(path: Path) -> None:
    """One trained group of two rollouts, its step, its version and all else that a reader is asked for."""
    times = iter([1.0, 3.0, 4.0, 4.0, 5.0, 6.0, 5.0])
    with Journal(path, clock=times.__next__) as journal:
        journal.meta("train_started", 0.0)
        journal.version(Version(id=0, parent=-1, step=0, digest=1))
        digest = f"{1:016x}"
        journal.delivery(
            DeliveryRecord(
                version=0, engine="engine-0", accepted=True, staged_digest=digest, live_digest=digest, time=2.0
            )
        )
        journal.admitted(Group(id=7, prompt=Prompt(id="p"), version=0), ["7/0", "7/1"])
        for index in (1, 0):
            journal.rollout_ended(rollout(f"7/{index}", index))
        journal.group_ended(7, "trained", step=1)
        journal.step(
            StepRecord(step=1, version=0, objective="policy", groups=1, rollouts=2, tokens=6, trained_tokens=4), {0: 4}
        )
        journal.scheduled("consume", group_id=7, step=1, version=0)
        journal.sample(SampleRecord(version=0, moment="before", prompt="h", question="q", answer="a", reward=None))
        journal.evaluation(
            EvaluationRecord(
                version=0,
                moment="before",
                prompts=1,
                samples=1,
                pass_1=0.5,
                pass_k=0.5,
                reward_mean=0.5,
                tokens_mean=2.0,
                started=0.0,
                ended=1.0,
            )
        )
        journal.activity(process="engine-0", started=0.0, ended=4.0, busy_seconds=1.0)


def answers(path: Path) -> list[object]:
    with open_readonly(path) as reader:
        return [
            reader.meta(),
            reader.counts(),
            reader.imbalances(),
            reader.sampled_tokens(),
            reader.steps(),
            reader.step(1),
            reader.step(2),
            (reader.last_step(), reader.warm_start_steps(), reader.lag_tokens(), reader.training_window()),
            reader.idle_fraction("engine-*", (0.0, 4.0)),
            reader.ended_groups(),
            [(group.id, group.prompt.id, [found.id for found in group.rollouts]) for group in reader.trained_groups(1)],
            (reader.scheduled_events(), reader.misscheduled_groups()),
            (reader.versions(), reader.republished(), reader.deliveries(), reader.evaluations(), reader.samples()),
            (list(reader.rollout_records()), reader.kept_ids(), reader.kept_ids([0]), reader.kept_ids([5])),
            (reader.restarts(), reader.regenerated_tokens()),
        ]


def test_answers_are_typed_and_as_written(tmp_path: Path) -> None:
    write(tmp_path / "journal.db")
    with open_readonly(tmp_path / "journal.db") as reader:
        [delivery] = reader.deliveries()
        assert (delivery.accepted, delivery.proved, delivery.staged_digest) == (True, True, f"{1:016x}")
        [step] = reader.steps()
        assert (step.step, step.version, step.trained_tokens, step.ended, step.loss) == (1, 0, 4, 6.0, None)
        records = list(reader.rollout_records("prompt = 'p'"))
        assert [(found.id, found.step, found.trained_as) for found in records] == [("7/0", 1, 0), ("7/1", 1, 0)]
        assert [found.index for found in reader.rollouts()] == [0, 1]
        [group] = reader.ended_groups()
        assert (group.id, group.tokens, group.reward, group.seconds, group.age) == (7, 2.0, 1.0, 2.0, 0)
        assert (reader.kept_ids([0]), reader.kept_ids([5])) == (["7/0", "7/1"], [])
        assert reader.idle_fraction("engine-*", (0.0, 4.0)) == 0.75


def test_more_columns_in_any_place_change_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write(path)
    before = answers(path)
    db = sqlite3.connect(path, isolation_level=None)
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        names = ", ".join(name for _, name, *_ in db.execute(f"PRAGMA table_info({table})"))
        db.execute(f"CREATE TABLE more AS SELECT 'policy' AS added, {names} FROM {table}")
        db.execute(f"DROP TABLE {table}")
        db.execute(f"ALTER TABLE more RENAME TO {table}")
    db.close()
    assert answers(path) == before


def test_all_answers_are_of_one_moment(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.version(Version(id=0, parent=-1, step=0, digest=1))
        journal.flush()
        with open_readonly(tmp_path / "journal.db") as reader:
            assert len(reader.versions()) == 1
            journal.version(Version(id=1, parent=0, step=1, digest=2))
            journal.flush()
            assert len(reader.versions()) == 1
        with open_readonly(tmp_path / "journal.db") as reader:
            assert len(reader.versions()) == 2


def test_a_damaged_journal_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    write(path)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("DROP TABLE deliveries")
    db.execute("UPDATE steps SET trained_tokens = 'many'")
    db.close()
    for ask in ("deliveries", "steps"):
        with (
            pytest.raises(DataError, match=r"journal\.db cannot be read as a journal") as caught,
            open_readonly(path) as reader,
        ):
            getattr(reader, ask)()
        assert "\n" not in str(caught.value)


def test_nobody_else_reads_the_journal() -> None:
    """SQL, and the module for it, only under buffer/."""
    query = re.compile(r"\bSELECT\b.+\bFROM\b", re.DOTALL)
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.is_relative_to(SOURCE / "buffer"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if "sqlite3" in names or query.search(text):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert found == []
