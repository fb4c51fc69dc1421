"""What is damaged in a journal or its segments is named, nothing is deleted, and the intact part goes on."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from test_recovery import dead_run

from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.store import check_resumable
from headrace.errors import UserError


def live_copy(tmp_path: Path) -> Path:
    """A journal as `kill -9` leaves it: everything is still in the write-ahead log."""
    with Journal(tmp_path / "live/journal.db") as journal:
        journal.meta("name", "x")
        journal.flush()
        shutil.copytree(tmp_path / "live", tmp_path / "dead")
    return tmp_path / "dead/journal.db"


def test_friction_43_an_empty_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"journal\.db is damaged \(it is empty; .*journal\.db-wal, may have been lost"):
        check_resumable(path)
    assert path.read_bytes() == b""


def test_friction_43_a_lost_log_is_refused_in_one_line(tmp_path: Path) -> None:
    path = live_copy(tmp_path)
    check_resumable(path)
    path.with_name("journal.db-wal").unlink()
    with pytest.raises(UserError, match="it is empty"):
        check_resumable(path)


def test_friction_43_missing_tables_and_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    check_resumable(path)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE steps")
        db.execute("DROP TABLE versions")
    with pytest.raises(UserError, match=r"is damaged \(it has no table steps, versions\)"):
        check_resumable(path)
    db.close()
    other = tmp_path / "other.db"
    other.write_bytes(b"not a database at all, but long enough to look at" * 100)
    with pytest.raises(UserError, match="cannot be opened as a journal: file is not a database"):
        check_resumable(other)


def test_friction_43_deleted_segments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    (tmp_path / "segments/000001.seg").unlink()
    with Journal(path) as journal:
        found = journal.recover(step=2)
        (line,) = found.damage
        assert "segments/000001.seg is missing: the tokens of groups 0, 1, 2, 3, 4, 5, 6 cannot be read" in line
        assert found.resume_step == 2 and found.groups.reasons["dropped"] == {"rolled back": 3}
        assert [(left.group.id, left.complete) for left in found.unfinished] == [(4, False), (6, False), (7, False)]
        assert journal.recover(step=2).damage == [], "it is said once"
    with open_readonly(path) as reader:
        assert reader.imbalances() == []


def test_a_damaged_record_loses_only_its_own_group_and_the_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    segment = tmp_path / "segments/000001.seg"
    with open_readonly(path) as reader:
        (record,) = reader.rollout_records("id = '4/1'")
    data = bytearray(segment.read_bytes())
    assert record.offset is not None
    data[record.offset + 30] ^= 1
    segment.write_bytes(data)
    with Journal(path) as journal:
        found = journal.recover(step=2)
        assert found.damage == [
            f"{segment} is damaged: the tokens of group 4 cannot be read, and are sampled again where needed; the file "
            "is kept as damaged-000001.seg"
        ]
        assert (tmp_path / "segments/damaged-000001.seg").read_bytes() == data and not segment.exists()
        assert found.resume_step == 5, "all steps can be trained again, from the file that was set aside"
        assert [left.group.id for left in found.unfinished] == [4, 6, 7]
        ready = found.unfinished[0]
        assert not ready.complete and set(ready.partial) == {"4/0"}, "the other answer is kept"
        journal.flush()
    with open_readonly(path) as reader:
        assert reader.imbalances() == []
        assert [len(group.rollouts) for group in reader.trained_groups(3)] == [2]


def test_a_damaged_record_of_a_trained_step_ends_what_can_be_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE rollouts SET offset = (SELECT offset FROM rollouts WHERE id = '0/0') WHERE id = '3/0'")
    with Journal(path) as journal:
        found = journal.recover(step=2)
        assert "the tokens of group 3 cannot be read" in found.damage[0], "the record there is of another rollout"
        assert found.resume_step == 3
        assert found.groups.reasons["dropped"] == {"rolled back": 1}
