"""The journal: the state and the ledgers of a run in `journal.db` (SQLite, WAL; `schema.sql`), tokens in `segments/`.

    event methods ──bounded queue──▶ writer thread ──every COMMIT_SECONDS──▶ segments flushed, then one transaction

Events are written in the order of the calls, and a row that points into a segment is never committed before its bytes.
A kill loses at most the last fraction of a second, never the balance of the ledgers. What the writer cannot write ends
the next call with an error; nothing is lost in silence.
"""

from __future__ import annotations

import fcntl
import math
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar

import msgspec

from headrace.buffer.ledger import Counts, EndState
from headrace.buffer.segments import Segments, read
from headrace.errors import HeadraceError, UserError
from headrace.types import Group, Rollout, Version

SCHEMA = 1
COMMIT_SECONDS = 0.25
QUEUE_EVENTS = 10_000
DEADLINE_SECONDS = 30.0
T = TypeVar("T")
Event = Callable[[], object]
"""What the writer thread is to do inside the next transaction."""


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runs before this one stopped."""

    next_group: int
    last_version: int
    """The highest id ever published, -1 if none: the next version takes a higher one."""
    last_step: int
    lost_prompts: list[str]
    """Prompts of the groups that were interrupted or rolled back, oldest first."""
    groups: Counts
    rollouts: Counts


class _Call(Generic[T]):
    """Something to run on the writer thread, and to wait for until it is committed."""

    def __init__(self, body: Callable[[], T]) -> None:
        self.body = body
        self.done = threading.Event()
        self.result: T

    def __call__(self) -> None:
        self.result = self.body()


class Journal:
    """The writing side: one live journal per run directory. Calls only queue, and may come from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        keep_rollouts: bool = True,
        clock: Callable[[], float] = time.time,
        lock_seconds: float = 10.0,
    ) -> None:
        """Open or create. `lock_seconds`: how long another SQL client may hold the file before that is an error."""
        self.path = path
        self._clock = clock
        self._queue: queue.Queue[Event] = queue.Queue(QUEUE_EVENTS)
        self._failure: str | None = None
        self._reported = False
        self._closed = False
        self._gate = threading.Lock()
        """Between the last event and `close`: an event that was accepted is written."""
        self._lock = _lock(path)
        try:
            self._segments = Segments(path.parent / "segments") if keep_rollouts else None
            self._db = _open(path, lock_seconds)
        except OSError as error:
            self._lock.close()
            raise UserError(f"{path.parent} cannot be written: {error}") from error
        except UserError:
            self._lock.close()
            raise
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def meta(self, key: str, value: Any) -> None:
        """A fact about the run, as a JSON value; the last one given counts."""
        sql = "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
        self._put(partial(self._write, sql, key, _json(value)))

    def version(self, version: Version, time: float | None = None) -> None:
        """Weights were published."""
        row = (version.id, version.parent, version.step, _hex(version.digest), self._time(time))
        self._insert("versions", *row)

    def delivery(
        self,
        *,
        version: int,
        engine: str,
        accepted: bool,
        quarantined: bool = False,
        reason: str = "",
        staged_digest: int = 0,
        live_digest: int = 0,
        canary_error: float = 0.0,
        stage_seconds: float = 0.0,
        swap_seconds: float = 0.0,
        time: float | None = None,
    ) -> None:
        """An engine's proof of a version."""
        # SQLite stores NaN as NULL; a canary that is not a number is infinitely wrong.
        error = math.inf if math.isnan(canary_error) else float(canary_error)
        proof = (version, engine, int(accepted), int(quarantined), reason, _hex(staged_digest), _hex(live_digest))
        self._insert("deliveries", *proof, error, float(stage_seconds), float(swap_seconds), self._time(time))

    def admitted(self, group: Group, rollout_ids: Iterable[str], time: float | None = None) -> None:
        """A group took its slot, and its rollouts start."""
        when = self._time(time)
        members = [(rollout_id, group.id, when) for rollout_id in rollout_ids]
        self._put(partial(self._write_admitted, (group.id, group.prompt.id, group.version, when), members))

    def rollout_ended(self, rollout: Rollout, time: float | None = None) -> None:
        """A rollout ended and was judged: its tokens go to a segment. Do not change it afterwards."""
        self._put(partial(self._write_rollout, rollout, self._time(time)))

    def group_ended(
        self, group_id: int, state: EndState, reason: str = "", step: int | None = None, time: float | None = None
    ) -> None:
        """A group ended, and with it all its rollouts that have not failed."""
        if (state == "trained") != (step is not None) or (state == "trained") == bool(reason):
            raise HeadraceError(
                f"group {group_id}: {state} needs {'a step' if state == 'trained' else 'a reason'} only"
            )
        self._put(partial(self._write_group_end, group_id, state, reason, step, self._time(time)))

    def step(
        self,
        *,
        step: int,
        version: int,
        objective: str,
        groups: int,
        rollouts: int,
        tokens: int,
        trained_tokens: int,
        lag_histogram: Mapping[int, int],
        reward_mean: float | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        seconds: float | None = None,
        metrics: Mapping[str, float] | None = None,
        time: float | None = None,
    ) -> None:
        """An optimizer step is done."""
        lags = _json({str(lag): int(count) for lag, count in sorted(lag_histogram.items())})
        sums = (step, version, objective, groups, rollouts, tokens, trained_tokens, lags)
        reals = [None if x is None else float(x) for x in (reward_mean, loss, grad_norm, learning_rate, seconds)]
        self._insert("steps", *sums, *reals, self._time(time), _json(dict(metrics or {})))

    def evaluation(
        self,
        *,
        version: int,
        moment: Literal["before", "during", "after"],
        prompts: int,
        samples: int,
        pass_1: float,
        pass_k: float,
        reward_mean: float,
        tokens_mean: float,
        started: float,
        ended: float,
    ) -> None:
        """Held-out prompts were answered and judged."""
        means = (float(pass_1), float(pass_k), float(reward_mean), float(tokens_mean))
        self._insert("evaluations", version, moment, prompts, samples, *means, started, ended)

    def sample(
        self, *, version: int, moment: str, prompt: str, question: str, answer: str, reward: float | None
    ) -> None:
        """A held-out answer to read."""
        row = (version, moment, prompt, question, answer, None if reward is None else float(reward))
        self._insert("samples", *row)

    def activity(
        self, *, process: str, started: float, ended: float, busy_seconds: float, generated_tokens: int = 0
    ) -> None:
        """How busy a process was in an interval."""
        self._insert("activity", process, started, ended, float(busy_seconds), int(generated_tokens))

    def flush(self, timeout: float = DEADLINE_SECONDS) -> None:
        """Return when everything that was called before is committed."""
        self._call(lambda: None, timeout)

    def counts(self, timeout: float = DEADLINE_SECONDS) -> dict[str, dict[str, Any]]:
        """Both ledgers as the journal has them: the same form as `Ledgers.as_dict`."""
        return self._call(partial(_both_counts, self._db), timeout)

    def recover(self, step: int | None = None, timeout: float = DEADLINE_SECONDS) -> Recovered:
        """Close the books of a dead run: what was in flight becomes dropped, "interrupted".

        With `step`, the run goes on from the weights of that optimizer step: later steps are deleted, and what they
        trained becomes dropped, "rolled back", because the weights that it went into are gone.
        """
        return self._call(partial(self._recover, step), timeout)

    def close(self, timeout: float = DEADLINE_SECONDS) -> None:
        """Commit everything and let go of the file. Idempotent; raises a failure that nobody was told of yet."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise HeadraceError(f"the journal {self.path} could not be closed within {timeout:g} s")
        if self._failure is not None and not self._reported:
            raise HeadraceError(self._failure)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the caller's side of the queue

    def _time(self, given: float | None) -> float:
        return self._clock() if given is None else float(given)

    def _insert(self, table: str, *row: Any) -> None:
        marks = ", ".join("?" * len(row))
        self._put(partial(self._write, f"INSERT INTO {table} VALUES ({marks})", *row))

    def _put(self, event: Event) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        with self._gate:
            if self._closed:
                raise HeadraceError(f"the journal {self.path} is closed")
            while not self._try_put(event):
                if time.monotonic() > deadline:
                    raise HeadraceError(f"the journal {self.path} is {QUEUE_EVENTS} events behind and takes no more")

    def _try_put(self, event: Event) -> bool:
        if self._failure is not None:
            self._reported = True
            raise HeadraceError(self._failure)
        try:
            self._queue.put(event, timeout=0.05)
        except queue.Full:
            return False
        return True

    def _call(self, body: Callable[[], T], timeout: float) -> T:
        call = _Call(body)
        deadline = time.monotonic() + timeout
        self._put(call)
        while not call.done.wait(0.05):
            if self._failure is not None:
                self._reported = True
                raise HeadraceError(self._failure)
            if time.monotonic() > deadline:
                raise HeadraceError(f"the journal {self.path} was not written within {timeout:g} s")
        return call.result

    # ---- the writer thread

    def _run(self) -> None:
        finished = False
        try:
            while not (self._closed and self._queue.empty()):
                self._commit(self._collect())
            finished = True
        except (sqlite3.Error, OSError, HeadraceError) as error:
            self._failure = f"the journal {self.path} cannot be written: {error}"
        finally:
            if not finished and self._failure is None:
                self._failure = f"the journal {self.path} cannot be written: its writer died (see the traceback)"
            self._let_go()

    def _collect(self) -> list[Event]:
        """The events of the next commit: those of a quarter second, or up to one that somebody waits for."""
        events: list[Event] = []
        deadline = time.monotonic() + COMMIT_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(events) < QUEUE_EVENTS:
            try:
                events.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
            if isinstance(events[-1], _Call):
                break
        return events

    def _commit(self, events: list[Event]) -> None:
        if not events:
            return
        self._db.execute("BEGIN IMMEDIATE")
        for event in events:
            event()
        if self._segments is not None:
            self._segments.flush()
        self._db.execute("COMMIT")
        for event in events:
            if isinstance(event, _Call):
                event.done.set()

    def _let_go(self) -> None:
        try:
            self._db.close()
            if self._segments is not None:
                self._segments.close()
        except (sqlite3.Error, OSError) as error:
            self._failure = self._failure or f"the journal {self.path} cannot be closed: {error}"
        finally:
            self._lock.close()

    def _write(self, sql: str, *row: Any) -> int:
        return self._db.execute(sql, row).rowcount

    def _write_admitted(self, group: tuple[int, str, int, float], members: list[tuple[str, int, float]]) -> None:
        self._write(
            "INSERT INTO groups (id, prompt, version, state, admitted) VALUES (?, ?, ?, 'in_flight', ?)", *group
        )
        sql = "INSERT INTO rollouts (id, group_id, state, admitted) VALUES (?, ?, 'in_flight', ?)"
        self._db.executemany(sql, members)

    def _write_rollout(self, rollout: Rollout, when: float) -> None:
        failed = rollout.ending == "failed"
        sampled = [trace.versions[trace.trained] for trace in rollout.traces if trace.trained.any()]
        location = (None, None, None) if self._segments is None else self._segments.append(rollout)
        rows = self._write(
            "UPDATE rollouts SET state = ?, reason = ?, ending = ?, reward = ?, tokens = ?, sampled_tokens = ?,"
            " oldest_version = ?, newest_version = ?, ended = ?, segment = ?, offset = ?, length = ?"
            " WHERE id = ? AND state = 'in_flight' AND ended IS NULL",
            *("failed" if failed else "in_flight", rollout.reason if failed else "", rollout.ending),
            *(None if rollout.reward is None else float(rollout.reward), sum(len(trace) for trace in rollout.traces)),
            rollout.trained_tokens,
            *((min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled)) if sampled else (None, None)),
            *(when, *location, rollout.id),
        )
        if rows != 1:
            raise HeadraceError(f"rollout {rollout.id} ended but was not in flight")

    def _write_group_end(self, group_id: int, state: str, reason: str, step: int | None, when: float) -> None:
        ending = "SET state = ?, reason = ?, step = ?, ended = COALESCE(ended, ?)"
        row = (state, reason, step, when, group_id)
        if self._write(f"UPDATE groups {ending} WHERE id = ? AND state = 'in_flight'", *row) != 1:
            raise HeadraceError(f"group {group_id} cannot become {state}, it is not in flight")
        self._write(f"UPDATE rollouts {ending} WHERE group_id = ? AND state = 'in_flight'", *row)

    def _recover(self, step: int | None) -> Recovered:
        lost = "state = 'in_flight'" if step is None else f"(state = 'in_flight' OR step > {int(step)})"
        prompts = [prompt for (prompt,) in self._db.execute(f"SELECT prompt FROM groups WHERE {lost} ORDER BY id")]
        for table in ("groups", "rollouts"):
            self._write(
                f"UPDATE {table} SET reason = iif(state = 'in_flight', 'interrupted', 'rolled back'),"
                f" state = 'dropped', step = NULL, ended = COALESCE(ended, ?) WHERE {lost}",
                self._clock(),
            )
        if step is not None:
            self._write("DELETE FROM steps WHERE step > ?", step)
        self._forget_lost_segments()
        return Recovered(
            next_group=self._scalar("SELECT COALESCE(MAX(id) + 1, 0) FROM groups"),
            last_version=self._scalar("SELECT COALESCE(MAX(id), -1) FROM versions"),
            last_step=self._scalar("SELECT COALESCE(MAX(step), 0) FROM steps"),
            lost_prompts=prompts,
            groups=_counts(self._db, "groups"),
            rollouts=_counts(self._db, "rollouts"),
        )

    def _forget_lost_segments(self) -> None:
        """After a power failure, rows may point at bytes that never reached the disk."""
        sql = "SELECT segment, MAX(offset + length) FROM rollouts WHERE segment IS NOT NULL GROUP BY segment"
        for segment, end in self._db.execute(sql).fetchall():
            path = self.path.parent / "segments" / segment
            size = path.stat().st_size if path.exists() else 0
            if end > size:
                sql = "UPDATE rollouts SET segment = NULL, offset = NULL, length = NULL WHERE segment = ? AND"
                self._write(f"{sql} offset + length > ?", segment, size)

    def _scalar(self, sql: str) -> int:
        return int(self._db.execute(sql).fetchone()[0])


class JournalReader:
    """The reading side: sees what is committed, also while a run writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} does not exist: not the directory of a run")
        self._db = _connect(f"{path.absolute().as_uri()}?mode=ro", path, 10.0)
        self._db.row_factory = sqlite3.Row

    def counts(self) -> dict[str, dict[str, Any]]:
        """Both ledgers: the same form as `Ledgers.as_dict`."""
        return _both_counts(self._db)

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


def _lock(path: Path) -> BinaryIO:
    """The lock of a live run: the operating system frees it when the process ends, however it ends."""
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


def _open(path: Path, lock_seconds: float) -> sqlite3.Connection:
    fresh = not path.exists() or path.stat().st_size == 0
    db = _connect(str(path), path, lock_seconds, fresh=fresh)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        # In WAL mode NORMAL survives every death of the process; a power failure may lose the last commits, no more.
        db.execute("PRAGMA synchronous = NORMAL")
        if not _tables(db):
            schema = resources.files("headrace.buffer").joinpath("schema.sql").read_text()
            db.executescript(f"BEGIN; {schema}; INSERT INTO meta VALUES ('schema', '{SCHEMA}'); COMMIT;")
    except sqlite3.DatabaseError as error:
        db.close()
        raise UserError(f"{path} cannot be opened as a journal: {error}") from error
    return db


def _connect(name: str, path: Path, lock_seconds: float, *, fresh: bool = False) -> sqlite3.Connection:
    try:
        db = sqlite3.connect(
            name, timeout=lock_seconds, isolation_level=None, check_same_thread=False, uri=name.startswith("file:")
        )
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} cannot be opened as a journal: {error}") from error
    try:
        # A crash between creating the file and its tables leaves a database without any.
        if not fresh and (tables := _tables(db)):
            _check_schema(db, path, tables)
    except (sqlite3.DatabaseError, msgspec.DecodeError) as error:
        db.close()
        raise UserError(f"{path} cannot be opened as a journal: {error}") from error
    except UserError:
        db.close()
        raise
    return db


def _check_schema(db: sqlite3.Connection, path: Path, tables: set[str]) -> None:
    row = db.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() if "meta" in tables else None
    if row is None:
        raise UserError(f"{path} is not a journal of Headrace (no schema version in it)")
    found = msgspec.json.decode(row[0])
    if found != SCHEMA:
        raise UserError(f"{path} has schema {found}, but this version of Headrace reads schema {SCHEMA}")


def _tables(db: sqlite3.Connection) -> set[str]:
    return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _counts(db: sqlite3.Connection, table: str) -> Counts:
    counts = Counts(admitted=int(db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]))
    for state, reason, count in db.execute(f"SELECT state, reason, COUNT(*) FROM {table} GROUP BY state, reason"):
        setattr(counts, state, getattr(counts, state) + count)
        if state in counts.reasons:
            counts.reasons[state][reason] = count
    return counts


def _both_counts(db: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    return {table: _counts(db, table).as_dict() for table in ("groups", "rollouts")}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _hex(digest: int) -> str:
    return f"{digest & (2**64 - 1):016x}"
