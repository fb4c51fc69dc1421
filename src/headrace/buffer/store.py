"""The files of a journal: `journal.db`, its lock, and `segments/`. A live run holds them open as a `Store`.

Only one live run at a time writes the files. A `journal.db` of another schema, or of another program, is refused in one
line. A file of the previous schema is migrated when it is opened for writing. A reader sees such a file as if it were
migrated, and does not change it.

A row that points into a segment is never committed before the bytes of the segment. A durable transaction, such as that
of an optimizer step, is on the disk with everything before it when it ends, so a power failure does not lose it. Groups
and rollouts end once: an item that ends must have been in flight, otherwise an error is raised.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.buffer import checksums
from headrace.buffer.segments import RecordLocation, Segments, read
from headrace.errors import HeadraceError, UserError, one_line
from headrace.types import POLICY, Group, Rollout

SCHEMA = 3
OLD_SCHEMA = 2
"""The previous schema, without policies, and with a single trace per rollout in `partials`."""
WITH_POLICY = ("versions", "deliveries", "groups", "steps", "evaluations", "samples", "schedule")
LATER_COLUMNS = ("versions", "tasks", "passes", "sets")
"""The columns of evaluations that older releases did not record. Each holds a JSON object, by default an empty one."""
NEW_KEYS = ("versions", "steps", "partials")
"""The tables that have another primary key in the old schema. The migration creates them anew."""
LOCK_SECONDS = 10.0
"""How long another SQL client may lock the file before that is an error."""
COMMIT_SECONDS = 0.1
"""The time between two transactions, and so the most that a crash of the process loses."""


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


def check_resumable(path: Path) -> BinaryIO:
    """Return the lock of the run, for its `Store`.

    Raises `UserError` if a live run uses this journal or it is damaged, before anything of the run is changed.
    """
    with ExitStack() as refused:
        lock = refused.enter_context(lock_run(path))
        _check_whole(path)
        refused.pop_all()
    return lock


def _check_whole(path: Path) -> None:
    db = connect(f"{path.absolute().as_uri()}?mode=ro", path)
    try:
        problem = _find_damage(db)
    except sqlite3.OperationalError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        problem = str(error)
    finally:
        db.close()
    if problem:
        weights = f"; a new run can begin with a checkpoint below {path.parent} as its [model] path"
        raise UserError(f"{path} is damaged ({one_line(problem)}): nothing can go on from it{weights}")


def _find_damage(db: sqlite3.Connection) -> str:
    """Return what is wrong with the file as a whole; empty if nothing is."""
    with sqlite3.connect(":memory:") as new:
        new.executescript(_ddl())
        missing = sorted(_tables(new) - _tables(db))
    new.close()
    if not _tables(db):
        return "it is empty; its write-ahead log, journal.db-wal, may have been lost"
    if missing:
        return f"it has no table {', '.join(missing)}"
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    return "" if found == "ok" else str(found)


def prepare_for_writing(db: sqlite3.Connection) -> None:
    """Create the tables of a new file, or migrate a file of the old schema."""
    db.execute("PRAGMA journal_mode = WAL")
    if not _tables(db):
        db.executescript(f"BEGIN; {_ddl()}; INSERT INTO meta (key, value) VALUES ('schema', '{SCHEMA}'); COMMIT;")
    elif _schema(db) == OLD_SCHEMA:
        _migrate(db)
    for column in _missing_columns(db):
        db.execute(f"ALTER TABLE evaluations ADD COLUMN {column} TEXT NOT NULL DEFAULT '{{}}'")
    checksums.keep(db)


def as_current(db: sqlite3.Connection) -> None:
    """Let a read-only connection see the old schema as the present one, through temporary views of its own."""
    old = bool(_tables(db)) and _schema(db) == OLD_SCHEMA
    later = "".join(f", '{{}}' AS {column}" for column in _missing_columns(db))
    for table in WITH_POLICY if old else ("evaluations",) if later else ():
        added = (f", '{POLICY}' AS policy" if old else "") + (later if table == "evaluations" else "")
        db.execute(f"CREATE TEMP VIEW {table} AS SELECT rowid AS rowid, *{added} FROM main.{table}")
    if not old:
        return
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
            checksums.enable(db)
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
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
            # SQLite's message may quote damaged text, which Python cannot decode.
            raise UserError(f"{path} cannot be opened as a journal: {one_line(str(error))}") from error
        failed.pop_all()
    return db


def _schema(db: sqlite3.Connection) -> int | None:
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    return None if row is None else msgspec.json.decode(row[0])


def _missing_columns(db: sqlite3.Connection) -> list[str]:
    columns = [name for _, name, *_ in db.execute("PRAGMA table_info(evaluations)")]
    return [column for column in LATER_COLUMNS if columns and column not in columns]


def _ddl() -> str:
    return resources.files("headrace.buffer").joinpath("schema.sql").read_text()


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


class Store:
    """The tables and the segments. A store may pass from one thread to another, but only one may use it at a time."""

    def __init__(self, path: Path, *, keep_rollouts: bool, lock: BinaryIO | None = None) -> None:
        """Open the files. `lock` is the lock of the run, if it is taken already."""
        self.path = path
        self._updates: dict[tuple[str, ...], str] = {}
        """The statements of `_updating`, by table and columns."""
        self._lock = lock or lock_run(path)
        try:
            self.segments = Segments(path.parent / "segments") if keep_rollouts else None
            """The files with tokens; None if tokens are not kept."""
            self.db = connect(str(path), path, prepare_for_writing)
        except OSError as error:
            self._lock.close()
            raise UserError(f"{path.parent} cannot be written: {error}") from error
        except UserError:
            self._lock.close()
            raise

    def read(self, segment: str, offset: int, length: int) -> Rollout:
        """Read a rollout, or part of one, that was written before."""
        assert self.segments is not None
        self.segments.flush()
        return read(self.segments.directory, segment, offset, length)

    @contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[None]:
        """Write all changes of this context, or none: after an error the store can only be closed.

        In WAL mode, NORMAL survives every crash of the process, but a power failure may lose the last commits. FULL
        waits for the disk, and a durable transaction also waits for its segments, before it is committed.
        """
        self.db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self.db.execute("BEGIN IMMEDIATE")
        yield
        if self.segments is not None:
            self.segments.sync() if durable else self.segments.flush()
        self.db.execute("COMMIT")

    def write(self, sql: str, *row: Any) -> int:
        """Run a statement. Return the number of rows that it changed."""
        return self.db.execute(sql, row).rowcount

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> None:
        """Add a row, given by column names. With `replace`, the row replaces one that has the same key."""
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        marks = ", ".join("?" * len(row))
        self.write(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks})", *row.values())

    def admit(self, group: Group, when: float, members: list[tuple[str, int, float]]) -> None:
        """Write a group and its rollouts, given as (rollout id, group id, time), as in flight."""
        row = {"id": group.id, "prompt": group.prompt.id, "version": group.version, "policy": group.policy}
        self.insert("groups", {**row, "state": "in_flight", "admitted": when})
        sql = "INSERT INTO rollouts (id, group_id, state, admitted) VALUES (?, ?, 'in_flight', ?)"
        self.db.executemany(sql, members)

    def end_rollout(self, rollout: Rollout, when: float) -> None:
        """Write the tokens and the reward of a rollout. Unless it failed, it stays in flight until its group ends."""
        failed = rollout.ending == "failed"
        sampled = [versions for trace in rollout.traces if len(versions := trace.versions[trace.trained])]
        location = (None, None, None) if self.segments is None else self.segments.append(rollout)
        row = {
            "state": "failed" if failed else "in_flight",
            "reason": rollout.reason if failed else "",
            "ending": rollout.ending,
            # SQLite stores -0.0 as 0.0, and the checksum is that of what is stored.
            "reward": None if rollout.reward is None else float(rollout.reward) + 0.0,
            "tokens": sum(len(trace) for trace in rollout.traces),
            "sampled_tokens": sum(map(len, sampled)),
            "oldest_version": min(int(versions.min()) for versions in sampled) if sampled else None,
            "newest_version": max(int(versions.max()) for versions in sampled) if sampled else None,
            "ended": when,
            **dict(zip(RecordLocation._fields, location, strict=True)),
        }
        sql = f"{self._updating('rollouts', *row)} WHERE id = :id AND state = 'in_flight' AND rollouts.ended IS NULL"
        rows = self.db.execute(sql, {**row, "id": rollout.id}).rowcount
        if rows != 1:
            raise HeadraceError(f"rollout {rollout.id} ended but was not in flight")
        self.write("DELETE FROM partials WHERE rollout = ?", rollout.id)

    def save_partial(self, rollout: Rollout) -> None:
        """Write the next tokens of each trace of a rollout that is being sampled."""
        if self.segments is not None and any(len(trace) for trace in rollout.traces):
            self.add_partial(rollout, self.segments.append(rollout))

    def add_partial(self, rollout: Rollout, location: RecordLocation) -> None:
        """Add rows for a record that holds the next part of each of a rollout's traces."""
        sql = "SELECT COALESCE(MAX(part) + 1, 0) FROM partials WHERE rollout = ? AND trace = ?"
        where = location._asdict()
        for number, trace in enumerate(rollout.traces):
            if len(trace):
                (part,) = self.db.execute(sql, (rollout.id, number)).fetchone()
                row = {"rollout": rollout.id, "trace": number, "part": part, "tokens": len(trace)}
                self.insert("partials", {**row, **where})

    def drop_rollout(self, rollout_id: str, reason: str) -> None:
        """Drop a rollout that has ended and is written; it leaves its group."""
        sql = "UPDATE rollouts SET state = 'dropped', reason = ? WHERE id = ? AND state = 'in_flight'"
        if self.write(f"{sql} AND ended IS NOT NULL", reason, rollout_id) != 1:
            raise HeadraceError(f"rollout {rollout_id} cannot be dropped, it has not ended or is not in flight")

    def end_group(self, group_id: int, state: str, reason: str, step: int | None, when: float) -> None:
        """Set the end state of a group and of all its rollouts that are still in flight."""
        row = {"state": state, "reason": reason, "step": step, "when": when, "group": group_id}
        for table, key in (("groups", "id"), ("rollouts", "group_id")):
            setting = f"{self._updating(table, 'state', 'reason', 'step')}, ended = COALESCE(ended, :when)"
            found = self.db.execute(f"{setting} WHERE {key} = :group AND state = 'in_flight'", row).rowcount
            if table == "groups" and found != 1:
                raise HeadraceError(f"group {group_id} cannot become {state}, it is not in flight")
        self.write("DELETE FROM partials WHERE rollout IN (SELECT id FROM rollouts WHERE group_id = ?)", group_id)

    def _updating(self, table: str, *columns: str) -> str:
        """Return the start of an UPDATE that sets these columns from parameters of their names, and the checksum."""
        if (table, *columns) not in self._updates:
            setting = ", ".join(f"{column} = :{column}" for column in columns)
            checksum = checksums.computed(self.db, table, columns)
            self._updates[table, *columns] = f"UPDATE {table} SET {setting}, checksum = {checksum}"
        return self._updates[table, *columns]

    def close(self) -> None:
        """Close the files, and release the lock last."""
        with ExitStack() as closing:
            closing.callback(self._lock.close)
            closing.callback(self.db.close)
            if self.segments is not None:
                self.segments.close()
