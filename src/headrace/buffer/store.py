"""The files that a live run holds open: its lock, `journal.db` and `segments/`, all used by one thread.

A row that points into a segment is never committed before the bytes of the segment. Groups and rollouts end once: an
item that ends must have been in flight, otherwise an error is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.buffer.database import connect, lock_run, prepare_for_writing
from headrace.buffer.segments import RecordLocation, Segments
from headrace.errors import HeadraceError, UserError
from headrace.types import Group, Rollout

COMMIT_SECONDS = 0.1
"""The time between two transactions, and so the most that a crash of the process loses."""


class Store:
    """The tables and the segments. A store may pass from one thread to another, but only one may use it at a time."""

    def __init__(self, path: Path, *, keep_rollouts: bool) -> None:
        self.path = path
        self._lock = lock_run(path)
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
        return self.segments.read(segment, offset, length)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all changes of this context, or none: after an error the store can only be closed."""
        self.db.execute("BEGIN IMMEDIATE")
        yield
        if self.segments is not None:
            self.segments.flush()
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
        sampled = [trace.versions[trace.trained] for trace in rollout.traces if trace.trained.any()]
        location = (None, None, None) if self.segments is None else self.segments.append(rollout)
        rows = self.write(
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
        ending = "SET state = ?, reason = ?, step = ?, ended = COALESCE(ended, ?)"
        row = (state, reason, step, when, group_id)
        if self.write(f"UPDATE groups {ending} WHERE id = ? AND state = 'in_flight'", *row) != 1:
            raise HeadraceError(f"group {group_id} cannot become {state}, it is not in flight")
        self.write(f"UPDATE rollouts {ending} WHERE group_id = ? AND state = 'in_flight'", *row)
        self.write("DELETE FROM partials WHERE rollout IN (SELECT id FROM rollouts WHERE group_id = ?)", group_id)

    def close(self) -> None:
        """Close the files, and release the lock last."""
        try:
            self.db.close()
            if self.segments is not None:
                self.segments.close()
        finally:
            self._lock.close()
