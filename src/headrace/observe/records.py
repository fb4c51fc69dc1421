"""journal.db, read only: one consistent snapshot of a run, whether it is over, cut short or still going.

Everything goes through the documented schema (`buffer/schema.sql`) and plain SQL, as any other client would do it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import DataError

JOURNAL = "journal.db"
Row = dict[str, Any]


@contextmanager
def open_journal(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A read transaction on a run's journal; all queries in it see the same moment."""
    path = run_dir / JOURNAL
    if not path.is_file():
        raise DataError(f"{run_dir} is not a run directory: it has no {JOURNAL}")
    # Without a write-ahead log beside it nobody is writing, and then the file can be read where nothing may be created.
    live = path.with_name(JOURNAL + "-wal").exists()
    uri = path.resolve().as_uri() + ("?mode=ro" if live else "?immutable=1")
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=10.0, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            db.execute("BEGIN")
            yield db
    except sqlite3.DatabaseError as error:
        raise DataError(f"{path} cannot be read as a journal: {error}") from error


def rows(db: sqlite3.Connection, query: str, **parameters: Any) -> list[Row]:
    """The rows of a query as plain dicts."""
    return [dict(row) for row in db.execute(query, parameters)]


def one(db: sqlite3.Connection, query: str, **parameters: Any) -> Row:
    """The only row of an aggregate query."""
    return dict(db.execute(query, parameters).fetchone())


def read_meta(db: sqlite3.Connection) -> dict[str, Any]:
    """The table `meta`, its values decoded."""
    meta: dict[str, Any] = {}
    for row in db.execute("SELECT key, value FROM meta"):
        try:
            meta[row["key"]] = msgspec.json.decode(row["value"])
        except msgspec.DecodeError as error:
            raise DataError(f"the journal's meta value {row['key']!r} is not JSON: {error}") from error
    return meta


def training_window(db: sqlite3.Connection, meta: dict[str, Any]) -> tuple[float, float] | None:
    """When training began and ended; where it was cut, the last moment that the journal knows of stands for its end."""
    begin = meta.get("train_started")
    if begin is None:
        return None
    end = meta.get("train_ended")
    if end is None:
        last = one(db, "SELECT MAX(ended) AS ended FROM (SELECT ended FROM steps UNION ALL SELECT ended FROM activity)")
        end = last["ended"]
    return (float(begin), max(float(begin), float(end))) if end is not None else None


def policy_steps(db: sqlite3.Connection) -> list[Row]:
    """The policy's optimizer steps in order (a warm start's are not among them)."""
    return rows(db, "SELECT * FROM steps WHERE objective = 'policy' ORDER BY step")


def lag_tokens(db: sqlite3.Connection) -> dict[int, int]:
    """How many trained tokens had each lag, over all policy steps."""
    query = """
        SELECT CAST(entry.key AS INTEGER) AS lag, SUM(entry.value) AS tokens
        FROM steps, json_each(steps.lag_histogram) AS entry
        WHERE steps.objective = 'policy' GROUP BY lag ORDER BY lag
    """
    return {row["lag"]: row["tokens"] for row in rows(db, query)}
