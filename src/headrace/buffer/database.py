"""The file `journal.db`: who may open it, and which schema it must have.

Only one live run at a time writes the file. A file of another schema, or of another program, is refused in one line. A
file of the previous schema is migrated when it is opened for writing. A reader sees such a file as if it were migrated,
and does not change it.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import msgspec

from headrace.errors import UserError
from headrace.types import POLICY

SCHEMA = 3
OLD_SCHEMA = 2
"""The previous schema, without policies, and with a single trace per rollout in `partials`."""
WITH_POLICY = ("versions", "deliveries", "groups", "steps", "evaluations", "samples", "schedule")
NEW_KEYS = ("versions", "steps", "partials")
"""The tables that have another primary key in the old schema. The migration creates them anew."""
LOCK_SECONDS = 10.0
"""How long another SQL client may lock the file before that is an error."""


def lock_run(path: Path) -> BinaryIO:
    """Take the lock of a live run. The operating system frees the lock when the process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("a+b")
    except OSError as error:
        raise UserError(f"{path} cannot be opened as a journal: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode().strip()
        file.close()
        raise UserError(f"{path} is in use by a live run (process {owner})") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    file.flush()
    return file


def check_resumable(path: Path) -> None:
    """Raise `UserError` if a live run uses this journal or it is damaged, before anything of the run is changed."""
    lock_run(path).close()
    db = connect(f"{path.absolute().as_uri()}?mode=ro", path)
    try:
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except sqlite3.DatabaseError as error:
        found = str(error)
    finally:
        db.close()
    if found != "ok":
        problem = " ".join(found.split())
        weights = f"; a new run can begin with a checkpoint below {path.parent} as its [model] path"
        raise UserError(f"{path} is damaged ({problem}): nothing can go on from it{weights}")


def prepare_for_writing(db: sqlite3.Connection) -> None:
    """Create the tables of a new file, or migrate a file of the old schema."""
    db.execute("PRAGMA journal_mode = WAL")
    # In WAL mode, NORMAL survives every crash of the process. A power failure may lose the last commits only.
    db.execute("PRAGMA synchronous = NORMAL")
    if not _tables(db):
        db.executescript(f"BEGIN; {_ddl()}; INSERT INTO meta (key, value) VALUES ('schema', '{SCHEMA}'); COMMIT;")
    elif _schema(db) == OLD_SCHEMA:
        _migrate(db)


def as_current(db: sqlite3.Connection) -> None:
    """Let a read-only connection see the old schema as the present one, through temporary views of its own."""
    if not (_tables(db) and _schema(db) == OLD_SCHEMA):
        return
    for table in WITH_POLICY:
        db.execute(f"CREATE TEMP VIEW {table} AS SELECT rowid AS rowid, *, '{POLICY}' AS policy FROM main.{table}")
    db.execute("CREATE TEMP VIEW partials AS SELECT rowid AS rowid, *, 0 AS trace FROM main.partials")


def _migrate(db: sqlite3.Connection) -> None:
    """Migrate from the old schema to the present one in one transaction: a crash leaves the old one."""
    renamed = "".join(f"ALTER TABLE {table} RENAME TO old_{table};" for table in NEW_KEYS)
    added = "".join(
        f"ALTER TABLE {table} ADD COLUMN policy TEXT NOT NULL DEFAULT '{POLICY}';"
        for table in WITH_POLICY
        if table not in NEW_KEYS
    )
    moved = ""
    for table in NEW_KEYS:
        columns = ", ".join(name for _, name, *_ in db.execute(f"PRAGMA table_info({table})"))
        moved += f"INSERT INTO {table} ({columns}) SELECT {columns} FROM old_{table}; DROP TABLE old_{table};"
    stamped = f"UPDATE meta SET value = '{SCHEMA}' WHERE key = 'schema';"
    db.executescript(f"BEGIN IMMEDIATE; {renamed} {added} {_ddl()}; {moved} {stamped} COMMIT;")


def connect(name: str, path: Path, prepare: Callable[[sqlite3.Connection], None] | None = None) -> sqlite3.Connection:
    """Connect to a file path or `file:` URI, and check the schema. An error is a `UserError` that names `path`."""
    with ExitStack() as failed:
        try:
            db = sqlite3.connect(
                name, timeout=LOCK_SECONDS, isolation_level=None, check_same_thread=False, uri=name.startswith("file:")
            )
            failed.callback(db.close)
            # A new file has no tables, and neither has one that a crash left before its tables were created.
            if tables := _tables(db):
                found = _schema(db) if "meta" in tables else None
                if found is None:
                    raise UserError(f"{path} is not a journal of Headrace (no schema version in it)")
                if found not in (OLD_SCHEMA, SCHEMA):
                    raise UserError(
                        f"{path} has schema {found}, but this version of Headrace reads schema {SCHEMA} and, of "
                        f"earlier runs, {OLD_SCHEMA}"
                    )
            if prepare is not None:
                prepare(db)
        except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
            raise UserError(f"{path} cannot be opened as a journal: {error}") from error
        failed.pop_all()
    return db


def _schema(db: sqlite3.Connection) -> int | None:
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    return None if row is None else msgspec.json.decode(row[0])


def _ddl() -> str:
    return resources.files("headrace.buffer").joinpath("schema.sql").read_text()


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
