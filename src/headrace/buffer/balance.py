"""The two ledgers, of group attempts and of rollouts, counted from the tables of the journal and checked for balance.

Balance is more than a sum: every ended item has a reason, rollouts agree with their group, and every optimizer step
trained as many groups and rollouts as the ledgers say. The balance holds at every commit, so also for a live run.
"""

from __future__ import annotations

import sqlite3
from typing import Any, Literal

from headrace.buffer.ledger import Counts
from headrace.observe.summary import STATES, ledger_line

Table = Literal["groups", "rollouts"]
TABLES: tuple[Table, Table] = ("groups", "rollouts")


def count_ledger(db: sqlite3.Connection, table: Table, policy: str | None = None) -> Counts:
    """Count the ledger of one table. The most frequent reasons come first.

    With `policy`, only groups that train this policy, and their rollouts, are counted.
    """
    of_policy, given = "TRUE", () if policy is None else (policy,)
    if policy is not None:
        of_policy = "policy = ?" if table == "groups" else "group_id IN (SELECT id FROM groups WHERE policy = ?)"
    # The sums take one pass; GROUP BY would first sort a million rows.
    sums = ", ".join(f"COALESCE(SUM(state = '{state}'), 0)" for state in STATES)
    admitted, *found = db.execute(f"SELECT COUNT(*), {sums} FROM {table} WHERE {of_policy}", given).fetchone()
    counts = Counts(admitted=int(admitted))
    for state, count in zip(STATES, found, strict=True):
        setattr(counts, state, int(count))
    why = f"""
        SELECT state, reason, COUNT(*) AS n FROM {table} WHERE state IN ('dropped', 'failed') AND {of_policy}
        GROUP BY state, reason ORDER BY n DESC, reason
    """
    for state, reason, count in db.execute(why, given):
        counts.reasons[state][reason] = count
    return counts


def count_ledgers(db: sqlite3.Connection, policy: str | None = None) -> dict[str, dict[str, Any]]:
    """Count both ledgers, of one policy or of all, in the form of `Ledgers.as_dict`."""
    return {table: count_ledger(db, table, policy).as_dict() for table in TABLES}


def imbalances(db: sqlite3.Connection) -> list[str]:
    """Return every contradiction within the ledgers, between them, or between them and the steps, one line each."""
    return [*_within(db, "groups"), *_within(db, "rollouts"), *_between(db), *_with_steps(db)]


def _within(db: sqlite3.Connection, table: Table) -> list[str]:
    """Check one ledger by itself: its sum, a reason for every drop and failure, a step for every trained item."""
    counts = count_ledger(db, table).as_dict()
    found = []
    if counts["admitted"] != sum(counts[state] for state in STATES):
        found.append(f"{table}: {ledger_line(counts)}")
    silent = "state IN ('dropped', 'failed') AND reason = ''"
    found += _line(db, f"{table} ended without a reason", f"SELECT id FROM {table} WHERE {silent}")
    trained = "(state = 'trained') <> (step IS NOT NULL)"
    return found + _line(
        db, f"{table} with a step but not trained, or the reverse", f"SELECT id FROM {table} WHERE {trained}"
    )


def _between(db: sqlite3.Connection) -> list[str]:
    """Check that rollouts agree with their group.

    A group ends with all its rollouts. Single rollouts may have been left out of a group that continued or was trained.
    """
    joined = "rollouts LEFT JOIN groups ON groups.id = rollouts.group_id"
    left_out = "rollouts.state = 'failed' OR rollouts.reason IN ('straggler', 'overlong')"
    differ = f"NOT ({left_out}) AND (rollouts.state <> groups.state OR rollouts.step IS NOT groups.step)"
    return [
        *_line(db, "rollouts without a group", f"SELECT rollouts.id FROM {joined} WHERE groups.id IS NULL"),
        *_line(db, "rollouts that disagree with their group", f"SELECT rollouts.id FROM {joined} WHERE {differ}"),
    ]


def _with_steps(db: sqlite3.Connection) -> list[str]:
    """Check the counts of every step.

    A step is written after its groups, so the groups that it counts must be there.
    """
    found = []
    for table in TABLES:
        counted = f"SELECT step, COUNT(*) AS n FROM {table} WHERE state = 'trained' GROUP BY step"
        query = f"""
            SELECT steps.step AS id FROM steps LEFT JOIN ({counted}) AS ledger ON ledger.step = steps.step
            WHERE steps.objective = 'policy' AND steps.{table} <> COALESCE(ledger.n, 0) ORDER BY id
        """
        found += _line(db, f"steps that trained other {table} than the ledger says", query)
    return found


def _line(db: sqlite3.Connection, what: str, query: str) -> list[str]:
    ids = [str(found) for (found,) in db.execute(query)]
    more = ", ..." if len(ids) > 3 else ""
    return [f"{len(ids):,} {what}: {', '.join(ids[:3])}{more}"] if ids else []
