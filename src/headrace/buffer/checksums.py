"""Checksums of the rows that training depends on: the column `checksum` of the tables in `CHECKED`.

Triggers of the writing connection keep them, so no statement can forget one. A statement that gives the checksum
itself is faster, and then the trigger does nothing. A row whose checksum is NULL was written before there were
checksums, or by another program, and is not checked. The rows of `partials` need none: each points to a record of a
segment, which has a checksum and the rollout's id.
"""

import sqlite3
import zlib
from collections.abc import Sequence
from typing import Any

CHECKED = {
    "meta": ("key", "value"),
    "versions": ("id", "parent", "step", "digest", "policy"),
    "groups": ("id", "prompt", "version", "state", "reason", "step", "policy"),
    "rollouts": (
        *("id", "group_id", "state", "reason", "ending", "reward", "tokens", "sampled_tokens"),
        *("oldest_version", "newest_version", "step", "segment", "offset", "length"),
    ),
    "steps": (
        *("step", "version", "objective", "groups", "rollouts", "tokens", "trained_tokens"),
        *("lag_histogram", "reward_mean", "loss", "metrics", "policy"),
    ),
}
"""Table -> the columns that its checksum covers. Never change them: journals on disk have checksums of these."""


def enable(db: sqlite3.Connection) -> None:
    """Let a connection compute checksums."""
    db.create_function("row_checksum", -1, _checksum, deterministic=True)


def keep(db: sqlite3.Connection) -> None:
    """Give every row that this connection writes its checksum. Tables of an older journal get the column."""
    enable(db)
    for table in CHECKED:
        if not _has_checksums(db, table):
            db.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER")
        # A rollout that has only just begun has nothing to check yet.
        for event in ("UPDATE",) if table == "rollouts" else ("INSERT", "UPDATE"):
            db.execute(
                f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} "
                f"WHEN NEW.checksum IS {'OLD.checksum' if event == 'UPDATE' else 'NULL'} BEGIN "
                f"UPDATE {table} SET checksum = {computed(db, table)} WHERE rowid = NEW.rowid; END"
            )


def sound(db: sqlite3.Connection, table: str) -> str:
    """Return the SQL condition that a row of a table is as it was written."""
    return f"(checksum IS NULL OR checksum = {computed(db, table)})" if _has_checksums(db, table) else "TRUE"


def damaged_rows(db: sqlite3.Connection, table: str, column: str, where: str = "TRUE", *given: Any) -> list[Any]:
    """Return a column of the rows of a table that are not as they were written, in order."""
    sql = f"SELECT DISTINCT {column} FROM {table} WHERE {where} AND NOT {sound(db, table)} ORDER BY 1"
    return [found for (found,) in db.execute(sql, given)]


def computed(db: sqlite3.Connection, table: str, changed: Sequence[str] = ()) -> str:
    """Return the SQL expression for a row's checksum. An UPDATE names the columns that it sets from parameters."""
    # A damaged text may not be UTF-8, so texts are compared as bytes.
    types = _types(db, table)
    columns = ((name, f":{name}" if name in changed else name) for name in CHECKED[table])
    return f"row_checksum({', '.join(f'CAST({v} AS BLOB)' if types[name] == 'TEXT' else v for name, v in columns)})"


def _has_checksums(db: sqlite3.Connection, table: str) -> bool:
    return "checksum" in _types(db, table)


def _types(db: sqlite3.Connection, table: str) -> dict[str, str]:
    return {name: kind for _, name, kind, *_ in db.execute(f"PRAGMA table_info({table})")}


def _checksum(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())
