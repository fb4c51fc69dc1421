"""What is damaged in a journal or its segments is named, nothing is deleted, and the intact part goes on."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
from test_recovery import admit, dead_run, trace

from headrace.buffer import checksums
from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.store import check_resumable
from headrace.errors import DataError, UserError
from headrace.types import Ending, Rollout


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
        other = "(SELECT offset FROM rollouts WHERE id = '0/0')"
        db.execute(f"UPDATE rollouts SET offset = {other}, checksum = NULL WHERE id = '3/0'")
    db.close()
    with Journal(path) as journal:
        found = journal.recover(step=2)
        assert "the tokens of group 3 cannot be read" in found.damage[0], "the record there is of another rollout"
        assert found.resume_step == 3
        assert found.groups.reasons["dropped"] == {"rolled back": 1}


def damage(path: Path, sql: str) -> None:
    """Change rows as a faulty disk would: the checksums stay."""
    with sqlite3.connect(path) as db:
        db.execute(sql)
    db.close()


@pytest.mark.parametrize(
    ("sql", "line", "failed", "resume_step"),
    [
        ("UPDATE groups SET prompt = 'p5' WHERE id = 4", "table groups do not match their checksums (id 4)", [4], 5),
        ("UPDATE rollouts SET reward = 64 WHERE id = '4/0'", "table rollouts do not match", [4], 5),
        ("UPDATE groups SET version = 9 WHERE id = 7", "(id 7)", [7], 5),
        ("UPDATE groups SET step = 6 WHERE id = 3", "(id 3)", [3], 3),
        ("UPDATE rollouts SET length = 5 WHERE id = '5/1'", "(group_id 5)", [5], 4),
        ("UPDATE rollouts SET ending = CAST(X'ff00' AS TEXT) WHERE id = '4/1'", "(group_id 4)", [4], 5),
        ("UPDATE steps SET version = 8 WHERE step = 4", "table steps do not match their checksums (step 4)", [], 3),
        ("UPDATE steps SET version = 8 WHERE step = 1", "(step 1)", [], 5),
        ("UPDATE versions SET digest = 'x' WHERE id = 3", "table versions do not match their checksums (id 3)", [], 5),
        ("UPDATE groups SET prompt = 'p5' WHERE id = 0", "(id 0)", [], 5),
    ],
)
def test_a_damaged_row_is_named_and_its_group_failed_if_it_is_needed(
    tmp_path: Path, sql: str, line: str, failed: list[int], resume_step: int
) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    with open_readonly(path) as reader:
        assert reader.imbalances() == []
    damage(path, sql)
    with open_readonly(path) as reader:
        assert any("that are damaged" in problem for problem in reader.imbalances())
    with Journal(path) as journal:
        found = journal.recover(step=2)
        assert f"{path} is damaged: rows of the " in found.damage[0] and line in found.damage[0]
        assert found.resume_step == resume_step
        assert found.groups.failed == len(failed)
        assert not {left.group.id for left in found.unfinished} & set(failed)
        journal.flush()
        with open_readonly(path) as reader:
            rows = reader.rows("SELECT id FROM groups WHERE state = 'failed' ORDER BY id")
            assert [row["id"] for row in rows] == failed
            settled = resume_step == 5 and not failed
            assert [p for p in reader.imbalances() if not (settled and "damaged" in p)] == []


def test_a_damaged_row_is_not_shown_as_if_it_were_true(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    damage(path, "UPDATE rollouts SET reward = 0.75 WHERE id = '1/1'")
    with open_readonly(path) as reader:
        assert [record.id for record in reader.rollout_records("group_id = 0")] == ["0/0", "0/1"]
        with pytest.raises(DataError, match=r"journal\.db is damaged: the row of rollout 1/1 is not as it was written"):
            list(reader.rollout_records("reward > 0"))


def test_a_journal_from_before_checksums_is_read_and_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    dead_run(path)
    with sqlite3.connect(path) as db:
        for table in ("meta", "versions", "groups", "rollouts", "steps"):
            db.execute(f"ALTER TABLE {table} DROP COLUMN checksum")
    db.close()
    with open_readonly(path) as reader:
        assert reader.imbalances() == [] and len(list(reader.rollout_records())) == 16
    with Journal(path) as journal:
        found = journal.recover(step=2)
        assert found.damage == [] and found.resume_step == 5
        journal.group_ended(4, "failed", "a reason")
    damage(path, "UPDATE groups SET reason = 'another' WHERE id = 4")
    with open_readonly(path) as reader:
        assert reader.imbalances() == ["1 rows of groups that are damaged: 4"]


@pytest.mark.parametrize("reward", [None, 1.0, -0.0, 0.1, 1e300, -3])
@pytest.mark.parametrize("keep", [True, False])
def test_the_checksum_of_a_rollout_is_that_of_the_row_as_it_is_stored(
    tmp_path: Path, reward: float | None, keep: bool
) -> None:
    ending: Ending = "failed" if reward is None else "finished"
    with Journal(tmp_path / "journal.db", keep_rollouts=keep) as journal:
        admit(journal, 0)
        for index in range(2):
            traces = [trace([1, 2, 3])] if index else []
            journal.rollout_ended(
                Rollout(id=f"0/{index}", index=index, traces=traces, ending=ending, reward=reward, reason="é" * index)
            )
        for group_ends in (False, True):
            if group_ends:
                journal.group_ended(0, "dropped", "stale")
            journal.flush()
            with sqlite3.connect(tmp_path / "journal.db") as db:
                checksums.enable(db)
                assert db.execute("SELECT count(*) FROM rollouts WHERE checksum IS NULL").fetchone() == (0,)
                assert checksums.damaged_rows(db, "rollouts", "id") == []
                assert checksums.damaged_rows(db, "groups", "id") == []
            db.close()
