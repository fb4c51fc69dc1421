"""A journal of schema 2: read as it is, brought up to date when it is written, whole or not at all."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from committed_ledgers import committed

from headrace.buffer import store
from headrace.buffer.checksums import CHECKED
from headrace.buffer.journal import Journal, open_readonly
from headrace.errors import UserError
from headrace.types import Group, Prompt

OLD_RUN = Path("tests/data/run_schema_2")
TABLES = ("versions", "deliveries", "groups", "rollouts", "steps", "evaluations", "samples", "partials", "schedule")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    for name in ("journal.db", "segments"):
        source = OLD_RUN / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    return tmp_path / "journal.db"


def content(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Every row as it is in the file, by the names of its columns, without what a reader adds."""
    db = sqlite3.connect(path)
    db.row_factory = sqlite3.Row
    found = {table: [dict(row) for row in db.execute(f"SELECT * FROM {table} ORDER BY rowid")] for table in TABLES}
    db.close()
    return found


def columns(path: Path) -> dict[str, set[tuple[Any, ...]]]:
    """What SQLite says of each table's columns: name, type, not null, default, place in the primary key."""
    db = sqlite3.connect(path)
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {name: {tuple(row[1:]) for row in db.execute(f"PRAGMA table_info({name})")} for name in names}
    db.close()
    return found


def test_a_reader_sees_policies_and_traces_in_it_and_changes_nothing(old: Path) -> None:
    before = old.read_bytes()
    with open_readonly(old) as reader:
        assert reader.meta()["schema"] == 2
        for table in store.WITH_POLICY:
            assert {row["policy"] for row in reader.rows(f"SELECT policy FROM {table}")} <= {"policy"}, table
        assert {row["trace"] for row in reader.rows("SELECT trace FROM partials")} == {0}
        assert reader.counts() == reader.counts("policy")
        assert reader.counts()["groups"]["admitted"] == 44
        assert reader.counts("writer")["groups"]["admitted"] == 0
        assert {group.policy for group in reader.trained_groups(1)} == {"policy"}
        assert reader.samples() is not None
    assert old.read_bytes() == before


def test_it_is_brought_up_to_date_with_every_row(old: Path, tmp_path: Path) -> None:
    with open_readonly(old) as reader:
        counts = reader.counts()
    before = content(old)
    with Journal(old) as journal:
        assert committed(journal) == counts
    after = content(old)
    for table, rows in before.items():
        added: dict[str, Any] = (
            {"policy": "policy"} if table in store.WITH_POLICY else {"trace": 0} if table == "partials" else {}
        )
        if table in CHECKED:
            added["checksum"] = None
        if table == "evaluations":
            added |= {"versions": "{}", "tasks": "{}", "passes": "{}", "sets": "{}"}
        assert after[table] == [{**row, **added} for row in rows], table
    with open_readonly(old) as reader:
        assert reader.meta()["schema"] == 3
    Journal(tmp_path / "new.db").close()
    assert columns(old) == columns(tmp_path / "new.db")
    with Journal(old) as journal:  # and it is up to date when it is opened again
        journal.admitted(Group(id=999, prompt=Prompt(id="p"), version=8, policy="writer"), ["999/0"])
    with open_readonly(old) as reader:
        assert reader.counts("writer")["groups"]["admitted"] == 1


def test_evaluations_of_older_releases_are_read_without_their_versions(old: Path, tmp_path: Path) -> None:
    """Files of the present schema were written before evaluations had this column."""
    path = tmp_path / "earlier.db"
    shutil.copy(old, path)
    Journal(path).close()
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE evaluations DROP COLUMN versions")
    db.close()
    for journal in (old, path):
        with open_readonly(journal) as reader:
            assert [evaluation.versions for evaluation in reader.evaluations()] == ["{}"] * 3
    Journal(path).close()
    assert columns(path)["evaluations"] >= {("versions", "TEXT", 1, "'{}'", 0)}


def test_a_run_goes_on_from_the_tokens_that_are_in_it(old: Path) -> None:
    with open_readonly(old) as reader:
        rows = reader.rows("SELECT rollout, SUM(tokens) AS n FROM partials GROUP BY rollout")
        flying = reader.rows("SELECT id FROM groups WHERE state = 'in_flight' ORDER BY id")
    assert rows
    with Journal(old) as journal:
        found = journal.recover(step=8)
    assert [left.group.id for left in found.unfinished] == [row["id"] for row in flying]
    assert {left.group.policy for left in found.unfinished} == {"policy"}
    saved = {
        rollout: [len(trace) for trace in traces]
        for left in found.unfinished
        for rollout, traces in left.partial.items()
    }
    assert saved.items() >= {row["rollout"]: [row["n"]] for row in rows}.items()


def test_a_migration_that_fails_leaves_the_old_file(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(old)
    (tmp_path / "schema.sql").write_text("CREATE TABLE versions (id INTEGER)")
    monkeypatch.setattr(store.resources, "files", lambda package: tmp_path)
    with pytest.raises(UserError, match="cannot be opened as a journal"):
        Journal(old)
    monkeypatch.undo()
    assert content(old) == before
    with open_readonly(old) as reader:
        assert reader.meta()["schema"] == 2
    with Journal(old) as journal:
        assert committed(journal)["groups"]["admitted"] == 44
