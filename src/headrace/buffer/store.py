"""What a live run holds open: its lock, `journal.db` and `segments/`, all for one thread.

A row that points into a segment is never committed before its bytes. Groups and rollouts move once: what ends was in
flight, or that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.buffer.database import lock_run, open_database
from headrace.buffer.segments import RecordLocation, Segments
from headrace.errors import HeadraceError, UserError
from headrace.types import Group, Rollout


class Store:
    """The tables and the segments. It may be made in one thread and then used in another, never in two at a time."""

    def __init__(self, path: Path, *, keep_rollouts: bool, lock_seconds: float) -> None:
        self.path = path
        self._lock = lock_run(path)
        try:
            self._segments = Segments(path.parent / "segments") if keep_rollouts else None
            self.db = open_database(path, lock_seconds)
        except OSError as error:
            self._lock.close()
            raise UserError(f"{path.parent} cannot be written: {error}") from error
        except UserError:
            self._lock.close()
            raise

    @property
    def keeps_rollouts(self) -> bool:
        """Whether tokens are written, and can be read again."""
        return self._segments is not None

    def read(self, segment: str, offset: int, length: int) -> Rollout:
        """A rollout, or part of one, that was written."""
        assert self._segments is not None
        return self._segments.read(segment, offset, length)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing is written. After an error the store can only be closed, which takes everything back."""
        self.db.execute("BEGIN IMMEDIATE")
        yield
        if self._segments is not None:
            self._segments.flush()
        self.db.execute("COMMIT")

    def write(self, sql: str, *row: Any) -> int:
        """Run a statement; the number of rows that it changed."""
        return self.db.execute(sql, row).rowcount

    def insert(self, table: str, row: Mapping[str, Any], *, replace: bool = False) -> None:
        """Add a row, by the names of its columns; with `replace`, in place of one that has the same key."""
        verb = "INSERT OR REPLACE" if replace else "INSERT"
        marks = ", ".join("?" * len(row))
        self.write(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks})", *row.values())

    def admit(self, group: Group, when: float, members: list[tuple[str, int, float]]) -> None:
        """A group and its rollouts (id, group, time) are in flight."""
        row = {"id": group.id, "prompt": group.prompt.id, "version": group.version, "policy": group.policy}
        self.insert("groups", {**row, "state": "in_flight", "admitted": when})
        sql = "INSERT INTO rollouts (id, group_id, state, admitted) VALUES (?, ?, 'in_flight', ?)"
        self.db.executemany(sql, members)

    def end_rollout(self, rollout: Rollout, when: float) -> None:
        """A rollout has its tokens and its reward; it stays in flight until its group ends, unless it failed."""
        failed = rollout.ending == "failed"
        sampled = [trace.versions[trace.trained] for trace in rollout.traces if trace.trained.any()]
        location = (None, None, None) if self._segments is None else self._segments.append(rollout)
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
        """The next tokens of a rollout that is being sampled, in each of its traces; some traces may have none."""
        if self._segments is not None and any(len(trace) for trace in rollout.traces):
            self.add_partial(rollout, self._segments.append(rollout))

    def add_partial(self, rollout: Rollout, location: RecordLocation) -> None:
        """A record holds the next part of each of a rollout's traces."""
        sql = "SELECT COALESCE(MAX(part) + 1, 0) FROM partials WHERE rollout = ? AND trace = ?"
        where = location._asdict()
        for number, trace in enumerate(rollout.traces):
            if len(trace):
                (part,) = self.db.execute(sql, (rollout.id, number)).fetchone()
                row = {"rollout": rollout.id, "trace": number, "part": part, "tokens": len(trace)}
                self.insert("partials", {**row, **where})

    def drop_rollout(self, rollout_id: str, reason: str) -> None:
        """A rollout that has its tokens leaves its group."""
        sql = "UPDATE rollouts SET state = 'dropped', reason = ? WHERE id = ? AND state = 'in_flight'"
        if self.write(f"{sql} AND ended IS NOT NULL", reason, rollout_id) != 1:
            raise HeadraceError(f"rollout {rollout_id} cannot be dropped, it has not ended or is not in flight")

    def end_group(self, group_id: int, state: str, reason: str, step: int | None, when: float) -> None:
        """A group and all its rollouts that are still in flight take this state."""
        ending = "SET state = ?, reason = ?, step = ?, ended = COALESCE(ended, ?)"
        row = (state, reason, step, when, group_id)
        if self.write(f"UPDATE groups {ending} WHERE id = ? AND state = 'in_flight'", *row) != 1:
            raise HeadraceError(f"group {group_id} cannot become {state}, it is not in flight")
        self.write(f"UPDATE rollouts {ending} WHERE group_id = ? AND state = 'in_flight'", *row)
        self.write("DELETE FROM partials WHERE rollout IN (SELECT id FROM rollouts WHERE group_id = ?)", group_id)

    def forget_partial(self, rollout_id: str) -> None:
        """What was saved of a rollout is of no use."""
        self.write("DELETE FROM partials WHERE rollout = ?", rollout_id)

    def close(self) -> None:
        """Let go of the files, the lock last."""
        try:
            self.db.close()
            if self._segments is not None:
                self._segments.close()
        finally:
            self._lock.close()
