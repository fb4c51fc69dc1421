"""Reading a journal, of a live run or an ended one: only what is committed is seen, and nothing is ever changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.buffer.database import connect
from headrace.buffer.ledger import END_STATES, Counts
from headrace.buffer.segments import read
from headrace.errors import UserError
from headrace.types import Rollout

STATES = (*END_STATES, "in_flight")


class JournalReader:
    """The reading side: sees what is committed, also while a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} does not exist: not the directory of a run")
        self._db = connect(f"{path.absolute().as_uri()}?mode=ro", path, 10.0)
        self._db.row_factory = sqlite3.Row

    def counts(self) -> dict[str, dict[str, Any]]:
        """Both ledgers: the same form as `Ledgers.as_dict`."""
        return count_ledgers(self._db)

    def meta(self) -> dict[str, Any]:
        """All facts about the run."""
        return {key: msgspec.json.decode(value) for key, value in self._db.execute("SELECT key, value FROM meta")}

    def rows(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        """The answer to a query, a dict per row."""
        return [dict(row) for row in self._db.execute(sql, parameters)]

    def rollouts(self, where: str = "TRUE", *parameters: Any) -> Iterator[Rollout]:
        """The kept rollouts that meet an SQL condition, in the order of groups."""
        sql = f"SELECT segment, offset, length FROM rollouts WHERE segment IS NOT NULL AND ({where})"
        sql += " ORDER BY group_id, id"
        for segment, offset, length in self._db.execute(sql, parameters).fetchall():
            yield read(self.path.parent / "segments", segment, offset, length)

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_readonly(path: Path) -> JournalReader:
    """Read a journal, of a live run or an ended one."""
    return JournalReader(path)


def count_ledger(db: sqlite3.Connection, table: Literal["groups", "rollouts"]) -> Counts:
    """The ledger that the rows of a table make."""
    # Sums in one pass: grouping a million rows would sort them first.
    sums = ", ".join(f"COALESCE(SUM(state = '{state}'), 0)" for state in STATES)
    admitted, *ended = db.execute(f"SELECT COUNT(*), {sums} FROM {table}").fetchone()
    counts = Counts(admitted=int(admitted))
    for state, count in zip(STATES, ended, strict=True):
        setattr(counts, state, int(count))
    why = f"SELECT state, reason, COUNT(*) FROM {table} WHERE state IN ('dropped', 'failed') GROUP BY state, reason"
    for state, reason, count in db.execute(why):
        counts.reasons[state][reason] = count
    return counts


def count_ledgers(db: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    """Both ledgers: the same form as `Ledgers.as_dict`."""
    return {"groups": count_ledger(db, "groups").as_dict(), "rollouts": count_ledger(db, "rollouts").as_dict()}
