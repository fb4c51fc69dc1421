"""The only reader of a journal, of a live or an ended run. It has one method for each question that is asked.

A reader sees the journal at one moment: all its answers show what was committed at its first query. It changes nothing.
All SQL that reads a journal from outside is here and in `ledger`. Queries name their columns, so that a schema may add
columns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.buffer.checksums import sound
from headrace.buffer.ledger import TABLES, count_ledger, imbalances
from headrace.buffer.segments import read
from headrace.buffer.store import as_current, connect
from headrace.errors import DataError, UserError, one_line
from headrace.observe.records import (
    DeliveryRecord,
    EndedGroup,
    EvaluationRecord,
    RolloutRecord,
    SampleRecord,
    StepRecord,
    VersionRecord,
)
from headrace.observe.summary import STATES
from headrace.types import Group, Prompt, Rollout, republished_among, without_republished

Record = TypeVar("Record", bound=msgspec.Struct)

PROMPT = "(SELECT prompt FROM groups WHERE groups.id = rollouts.group_id)"
TASK = """
    (SELECT substr(prompt, 1, instr(prompt, '/') - 1) FROM groups
    WHERE groups.id = rollouts.group_id AND EXISTS (SELECT 1 FROM meta WHERE key = 'tasks'))
"""
"""The SQL expression for the name of a rollout's task, with which the prompt's id begins if the run has several."""
TRAINED_AS = "(SELECT version FROM steps WHERE steps.step = rollouts.step)"
ASKED = "policy = COALESCE(?, policy)"
"""The SQL condition for rows of one policy, or of all policies if the parameter is NULL."""
IN_ORDER = "ORDER BY group_id, length(id), id"
"""The SQL order of rollouts: by group and, within a group, by number."""


class JournalReader:
    """A journal at one moment. Use it in a `with` statement, which turns an error of SQLite into a `DataError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise DataError(f"{path.parent} is not a run directory: it has no {path.name}")
        file = path.resolve()
        # Without a write-ahead log nothing is writing. Then the file can be read even in a read-only directory.
        live = file.with_name(file.name + "-wal").exists()
        self._db = connect(f"{file.as_uri()}?{'mode=ro' if live else 'immutable=1'}", path, as_current)
        self._db.row_factory = sqlite3.Row
        self._db.execute("BEGIN")

    def meta(self) -> dict[str, Any]:
        """Return all facts about the run."""
        meta: dict[str, Any] = {}
        for key, value in self._db.execute("SELECT key, value FROM meta"):
            try:
                meta[key] = msgspec.json.decode(value)
            except msgspec.DecodeError as error:
                raise DataError(f"the journal's meta value {key!r} is not JSON: {error}") from error
        return meta

    def rows(self, sql: str, *parameters: Any) -> list[dict[str, Any]]:
        """Return the rows of any query as dicts. This is for questions that Headrace itself does not ask."""
        return [dict(row) for row in self._db.execute(sql, parameters)]

    # ---- the ledgers

    def counts(self, policy: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the ledgers of groups and of rollouts, of one policy or of all, in the form of `Ledgers.as_dict`."""
        return {table: msgspec.structs.asdict(count_ledger(self._db, table, policy)) for table in TABLES}

    def imbalances(self) -> list[str]:
        """Return every contradiction in the ledgers, one line each."""
        return imbalances(self._db)

    def sampled_tokens(self) -> dict[str, int]:
        """Return the number of sampled tokens of all rollouts in each state."""
        sums = ", ".join(f"COALESCE(SUM(sampled_tokens * (state = '{state}')), 0)" for state in STATES)
        found = self._db.execute(f"SELECT {sums} FROM rollouts").fetchone()
        return dict(zip(STATES, map(int, found), strict=True))

    def restarts(self) -> dict[str, int]:
        """Return how often each process was restarted. `controller` counts how often the run was resumed."""
        again = "process <> 'controller' OR reason = 'resumed'"
        sql = f"SELECT process, COUNT(*) FROM restarts WHERE {again} GROUP BY process ORDER BY process"
        return {process: int(count) for process, count in self._db.execute(sql)}

    def regenerated_tokens(self) -> int:
        """Return the number of tokens that were sampled, lost in a crash and sampled again."""
        return self._count("SELECT COALESCE(SUM(regenerated_tokens), 0) FROM restarts")

    # ---- training

    def steps(self) -> list[StepRecord]:
        """Return the optimizer steps of the policy in order, without the supervised steps of a warm start."""
        return self._records(StepRecord, "steps WHERE objective = 'policy' ORDER BY step")

    def step_curves(self) -> list[dict[str, float | None]]:
        """Return the further numbers of each policy step, in the order of `steps`: curves and the loss's own metrics.

        Steps of older releases have only the metrics of the loss.
        """
        sql = "SELECT metrics FROM steps WHERE objective = 'policy' ORDER BY step"
        try:
            return [msgspec.json.decode(text, type=dict[str, float | None]) for (text,) in self._db.execute(sql)]
        except msgspec.DecodeError as error:
            raise DataError(f"the metrics of a step in the journal are not numbers by name: {error}") from error

    def step(self, step: int, policy: str | None = None) -> StepRecord | None:
        """Return one optimizer step, of this policy if the run has several; None if there is no such step."""
        found = self._records(StepRecord, f"steps WHERE step = ? AND objective = 'policy' AND {ASKED}", (step, policy))
        return found[0] if found else None

    def newest_checkpoint(self) -> str | None:
        """Return the name of the newest checkpoint, or None if none was written. It may be on another host."""
        checkpoint = self.meta().get("checkpoint")
        return None if checkpoint is None else Path(checkpoint["path"]).name

    def last_step(self, policy: str | None = None) -> int:
        """Return the last optimizer step, of this policy if the run has several; 0 if there is none."""
        sql = f"SELECT COALESCE(MAX(step), 0) FROM steps WHERE objective = 'policy' AND {ASKED}"
        return self._count(sql, policy)

    def warm_start_steps(self) -> int:
        """Return the number of supervised steps before the first version."""
        return self._count("SELECT COUNT(*) FROM steps WHERE objective = 'imitation'")

    def lag_tokens(self) -> dict[int, int]:
        """Return the number of trained tokens with each lag, over all policy steps."""
        sql = """
            SELECT CAST(entry.key AS INTEGER) AS lag, SUM(entry.value)
            FROM steps, json_each(steps.lag_histogram) AS entry
            WHERE steps.objective = 'policy' GROUP BY lag ORDER BY lag
        """
        return {int(lag): tokens for lag, tokens in self._db.execute(sql)}

    def training_window(self) -> tuple[float, float] | None:
        """Return when training began, and when it ended or was cut off; None if it never began."""
        meta = self.meta()
        begin, end = meta.get("train_started"), meta.get("train_ended")
        if begin is None:
            return None
        if end is None:
            sql = "SELECT MAX(ended) FROM (SELECT ended FROM steps UNION ALL SELECT ended FROM activity)"
            (end,) = self._db.execute(sql).fetchone()
        return (float(begin), max(float(begin), float(end))) if end is not None else None

    def idle_fraction(self, processes: str, window: tuple[float, float]) -> float | None:
        """Return the idle share of the time that these processes (such as `engine-*`) spent in the window.

        Return None if they spent no time there. An interval that is partly in the window counts by its share inside.
        """
        sql = """
            WITH clipped AS (
                SELECT busy_seconds, ended - started AS whole, MIN(ended, :end) - MAX(started, :begin) AS inside
                FROM activity
                WHERE process GLOB :processes AND ended > started AND ended > :begin AND started < :end
            )
            SELECT SUM(busy_seconds * inside / whole), SUM(inside) FROM clipped
        """
        given = {"processes": processes, "begin": window[0], "end": window[1]}
        busy, elapsed = self._db.execute(sql, given).fetchone()
        return min(1.0, max(0.0, 1.0 - float(busy) / float(elapsed))) if elapsed else None

    def ended_groups(self) -> list[EndedGroup]:
        """Return every ended group that has at least one rollout with a recorded ending, oldest first."""
        sql = """
            SELECT groups.id, groups.state, groups.reason, groups.ended - groups.admitted AS seconds,
                AVG(rollouts.sampled_tokens) AS tokens, AVG(rollouts.reward) AS reward,
                groups.version, steps.version AS trained_as
            FROM groups JOIN rollouts ON rollouts.group_id = groups.id LEFT JOIN steps ON steps.step = groups.step
            WHERE groups.state <> 'in_flight' AND rollouts.ending IS NOT NULL
            GROUP BY groups.id ORDER BY groups.id
        """
        again, found = self.republished(), []
        for facts in self.rows(sql):
            admitted, trained = (facts.pop(key) for key in ("version", "trained_as"))
            age = (
                None if trained is None else without_republished(trained, again) - without_republished(admitted, again)
            )
            found.append(EndedGroup(**facts, age=age if age is None else int(age)))
        return found

    def trained_groups(self, step: int, policy: str | None = None) -> list[Group]:
        """Return the groups that a step trained, oldest first, without the rollouts that filters removed."""
        trained = f"step = ? AND state = 'trained' AND {ASKED}"
        sql = f"SELECT id, prompt, version, policy FROM groups WHERE {trained} ORDER BY id"
        return [
            Group(
                id=group_id,
                prompt=Prompt(id=prompt),
                version=version,
                policy=policy,
                rollouts=list(self.rollouts("group_id = ? AND state <> 'dropped'", group_id)),
            )
            for group_id, prompt, version, policy in self._db.execute(sql, (step, policy)).fetchall()
        ]

    def scheduled_events(self) -> int:
        """Return the number of recorded events, which is 0 without `[pipeline] record`."""
        return self._count("SELECT COUNT(*) FROM schedule")

    def misscheduled_groups(self) -> list[int]:
        """Return the groups whose step in the ledger is not the step that consumed them last in the schedule."""
        sql = """
            SELECT schedule.group_id FROM schedule JOIN groups ON groups.id = schedule.group_id
            WHERE schedule.id IN (SELECT MAX(id) FROM schedule WHERE event = 'consume' GROUP BY group_id)
            AND groups.state = 'trained' AND groups.step <> schedule.step
        """
        return [int(group_id) for (group_id,) in self._db.execute(sql)]

    # ---- versions

    def versions(self) -> list[VersionRecord]:
        """Return every published version, by id."""
        return self._records(VersionRecord, "versions ORDER BY id")

    def republished(self, policy: str | None = None) -> list[int]:
        """Return the versions that a restarted trainer published again: their weights had another id before."""
        found = self._db.execute(f"SELECT id, step FROM versions WHERE {ASKED} ORDER BY id", (policy,)).fetchall()
        return republished_among((int(version), int(step)) for version, step in found)

    def deliveries(self) -> list[DeliveryRecord]:
        """Return every engine's proof of every version, in the order of time."""
        return self._records(DeliveryRecord, "deliveries ORDER BY time")

    def evaluations(self) -> list[EvaluationRecord]:
        """Return every evaluation on held-out prompts, in the order of their ends."""
        return self._records(EvaluationRecord, "evaluations ORDER BY ended, version")

    def samples(self) -> list[SampleRecord]:
        """Return the held-out answers from before and after training, in the order in which they were recorded."""
        return self._records(SampleRecord, "samples WHERE moment IN ('before', 'after') ORDER BY rowid")

    # ---- rollouts

    def count_rollouts(self, where: str = "TRUE") -> int:
        """Return how many rollouts meet an SQL condition, which may also use `task`, and `prompt`, a prompt's id."""
        with self._condition(where):
            # The line break after the condition also ends an SQL comment in it.
            rows = f"SELECT id, {PROMPT} AS prompt, {TASK} AS task FROM rollouts WHERE ({where}\n)"
            return self._count(f"SELECT COUNT(*) FROM ({rows})")

    def rollout_records(
        self, where: str = "TRUE", *parameters: Any, limit: int | None = None, kept: bool = False
    ) -> Iterator[RolloutRecord]:
        """Yield the rollouts that meet an SQL condition, by group. With `kept`, only those with kept tokens."""
        given = {
            "prompt": f"{PROMPT} AS prompt",
            "task": f"{TASK} AS task",
            "trained_as": f"{TRAINED_AS} AS trained_as",
        }
        columns = ", ".join(given.get(name, f"rollouts.{name}") for name in RolloutRecord.__struct_fields__)
        sql = f"SELECT {columns}, {sound(self._db, 'rollouts')} AS sound FROM rollouts WHERE ({where}\n)"
        sql += f"{' AND segment IS NOT NULL' if kept else ''} {IN_ORDER}{'' if limit is None else f' LIMIT {limit}'}"
        with self._condition(where):
            for row in self._db.execute(sql, parameters):
                if not row["sound"]:
                    raise DataError(f"{self.path} is damaged: the row of rollout {row['id']} is not as it was written")
                yield _record(RolloutRecord, row)

    def rollouts(self, where: str = "TRUE", *parameters: Any) -> Iterator[Rollout]:
        """Yield the rollouts that meet an SQL condition and whose tokens were kept, in the order of groups."""
        for record in list(self.rollout_records(where, *parameters, kept=True)):
            rollout = self.tokens(record)
            assert rollout is not None
            yield rollout

    def newest(self, groups: int) -> Iterator[Rollout]:
        """Yield the trained rollouts of the newest groups: the largest trained id and the `groups` - 1 ids below."""
        last = "SELECT MAX(group_id) FROM rollouts WHERE state = 'trained'"
        return self.rollouts(f"state = 'trained' AND group_id > ({last}) - ?", groups)

    def tokens(self, record: RolloutRecord) -> Rollout | None:
        """Return a rollout with its tokens; None if its tokens were not kept, or are not there yet."""
        if record.segment is None:
            return None
        assert record.offset is not None
        assert record.length is not None
        return read(self.path.parent / "segments", record.segment, record.offset, record.length)

    def kept_ids(self, versions: Iterable[int] | None = None) -> list[str]:
        """Return the ids of the rollouts with kept tokens, or of those that these versions may have sampled in part."""
        sampled = "EXISTS (SELECT 1 FROM json_each(?) WHERE value BETWEEN oldest_version AND newest_version)"
        given = () if versions is None else (msgspec.json.encode(sorted(versions)).decode(),)
        sql = f"SELECT id FROM rollouts WHERE segment IS NOT NULL AND {sampled if given else 'TRUE'} {IN_ORDER}"
        return [found for (found,) in self._db.execute(sql, given)]

    # ---- the file

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self.close()
        if isinstance(error, sqlite3.DatabaseError | msgspec.DecodeError | UnicodeDecodeError):
            raise DataError(f"{self.path} cannot be read as a journal: {one_line(str(error))}") from error

    def _records(self, kind: type[Record], rest: str, parameters: Sequence[Any] = ()) -> list[Record]:
        columns = ", ".join(kind.__struct_fields__)
        return [_record(kind, row) for row in self._db.execute(f"SELECT {columns} FROM {rest}", parameters)]

    def _count(self, sql: str, *parameters: Any) -> int:
        return int(self._db.execute(sql, parameters).fetchone()[0])

    @contextmanager
    def _condition(self, where: str) -> Iterator[None]:
        """Turn an error of SQLite in this context into a one-line `UserError` about the condition."""
        self._count("SELECT COUNT(*) FROM rollouts WHERE FALSE")  # a broken journal is not the condition's fault
        try:
            yield
        except (sqlite3.Error, sqlite3.Warning) as error:
            reason = " ".join(str(error).split())  # SQLite quotes the condition, line breaks and all
            raise UserError(f"--where {where!r}: {reason} (an SQL condition on the table rollouts)") from error


def open_readonly(path: Path) -> JournalReader:
    """Open a journal for reading, of a live or an ended run."""
    return JournalReader(path)


def _record(kind: type[Record], row: sqlite3.Row) -> Record:
    return msgspec.convert(dict(row), kind, strict=False)
