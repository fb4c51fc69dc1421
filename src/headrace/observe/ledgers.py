"""The two ledgers of a run, group attempts and rollouts, counted in SQL from the journal, and whether they balance.

Balanced means more than a sum: what ended says why, rollouts agree with their group, and every optimizer step trained
as many groups and rollouts as the ledgers say that it did. It holds at every commit, so also of a live run.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from headrace.observe.records import one, open_journal, read_meta, rows

STATES = ("trained", "dropped", "failed", "in_flight")


def read_ledgers(run_dir: Path) -> dict[str, Any]:
    """Both ledgers of a run that is over, cut short or under way; `problems` is empty where they balance."""
    with open_journal(run_dir) as db:
        meta = read_meta(db)
        problems = imbalances(db)
        return {
            "name": meta.get("name"),
            "outcome": meta.get("outcome"),
            "groups": {**count_states(db, "groups"), "reasons": count_reasons(db, "groups")},
            "rollouts": {**count_states(db, "rollouts"), "reasons": count_reasons(db, "rollouts")},
            "sampled_tokens": _sampled_tokens(db),
            "regenerated_tokens": one(db, "SELECT COALESCE(SUM(regenerated_tokens), 0) AS n FROM restarts")["n"],
            "restarts": _restarts(db),
            "balanced": not problems,
            "problems": problems,
        }


def count_states(db: sqlite3.Connection, table: str) -> dict[str, int]:
    """How many were admitted, and how many are in each state."""
    # Sums in one pass: grouping a million rows would sort them first.
    sums = ", ".join(f"COALESCE(SUM(state = '{state}'), 0) AS {state}" for state in STATES)
    return one(db, f"SELECT COUNT(*) AS admitted, {sums} FROM {table}")


def count_reasons(db: sqlite3.Connection, table: str) -> dict[str, dict[str, int]]:
    """Why groups or rollouts were dropped or failed, most frequent first."""
    query = f"""
        SELECT state, reason, COUNT(*) AS n FROM {table} WHERE state IN ('dropped', 'failed')
        GROUP BY state, reason ORDER BY n DESC, reason
    """
    reasons: dict[str, dict[str, int]] = {"dropped": {}, "failed": {}}
    for row in rows(db, query):
        reasons[row["state"]][row["reason"]] = row["n"]
    return reasons


def imbalances(db: sqlite3.Connection) -> list[str]:
    """Every way in which the ledgers contradict themselves, each other, or the steps; a line each."""
    return [*_within(db, "groups"), *_within(db, "rollouts"), *_between(db), *_with_steps(db)]


def _within(db: sqlite3.Connection, table: str) -> list[str]:
    counts = count_states(db, table)
    found = []
    if counts["admitted"] != sum(counts[state] for state in STATES):
        found.append(f"{table}: {ledger_line(counts)}")
    silent = "state IN ('dropped', 'failed') AND reason = ''"
    found += _line(db, f"{table} ended without a reason", f"SELECT id FROM {table} WHERE {silent}")
    trained = "(state = 'trained') <> (step IS NOT NULL)"
    return found + _line(db, f"{table} with a step but not trained, or the reverse", _select(table, trained))


def _between(db: sqlite3.Connection) -> list[str]:
    """A group ends with all its rollouts; from one that goes on or was trained, single ones may have been left out."""
    joined = "rollouts LEFT JOIN groups ON groups.id = rollouts.group_id"
    left_out = "rollouts.state = 'failed' OR rollouts.reason IN ('straggler', 'overlong')"
    differ = f"NOT ({left_out}) AND (rollouts.state <> groups.state OR rollouts.step IS NOT groups.step)"
    return [
        *_line(db, "rollouts without a group", f"SELECT rollouts.id FROM {joined} WHERE groups.id IS NULL"),
        *_line(db, "rollouts that disagree with their group", f"SELECT rollouts.id FROM {joined} WHERE {differ}"),
    ]


def _with_steps(db: sqlite3.Connection) -> list[str]:
    """A step is written after the groups that it trained, so what it counts must be there."""
    found = []
    for table in ("groups", "rollouts"):
        counted = f"SELECT step, COUNT(*) AS n FROM {table} WHERE state = 'trained' GROUP BY step"
        query = f"""
            SELECT steps.step AS id FROM steps LEFT JOIN ({counted}) AS ledger ON ledger.step = steps.step
            WHERE steps.objective = 'policy' AND steps.{table} <> COALESCE(ledger.n, 0) ORDER BY id
        """
        found += _line(db, f"steps that trained other {table} than the ledger says", query)
    return found


def _select(table: str, where: str) -> str:
    return f"SELECT id FROM {table} WHERE {where}"


def _line(db: sqlite3.Connection, what: str, query: str) -> list[str]:
    ids = [str(row["id"]) for row in db.execute(query)]
    more = ", ..." if len(ids) > 3 else ""
    return [f"{len(ids):,} {what}: {', '.join(ids[:3])}{more}"] if ids else []


def _sampled_tokens(db: sqlite3.Connection) -> dict[str, int]:
    sums = ", ".join(f"COALESCE(SUM(sampled_tokens * (state = '{state}')), 0) AS {state}" for state in STATES)
    return one(db, f"SELECT {sums} FROM rollouts")


def _restarts(db: sqlite3.Connection) -> dict[str, int]:
    """Process -> how often it came back; the controller where the run was resumed."""
    again = "process <> 'controller' OR reason = 'resumed'"
    query = f"SELECT process, COUNT(*) AS n FROM restarts WHERE {again} GROUP BY process ORDER BY process"
    return {row["process"]: row["n"] for row in rows(db, query)}


def ledger_line(ledger: dict[str, Any]) -> str:
    """One ledger as its equation."""
    parts = " + ".join(f"{ledger[state]:,} {state.replace('_', ' ')}" for state in STATES)
    sign = "=" if ledger["admitted"] == sum(ledger[state] for state in STATES) else "≠"
    return f"{ledger['admitted']:,} admitted {sign} {parts}"


def describe_ledgers(ledgers: dict[str, Any]) -> str:
    """Both ledgers for people: an equation each, the reasons below it, and the verdict."""
    lines = [f"run       {ledgers['name'] or 'unnamed'} ({ledgers['outcome'] or 'no end recorded'})"]
    for table in ("groups", "rollouts"):
        lines.append(f"{table:<8}  {ledger_line(ledgers[table])}")
        for state, reasons in ledgers[table]["reasons"].items():
            lines += [
                f"            {count:>9,} {state}: {reason or '(no reason)'}" for reason, count in reasons.items()
            ]
    tokens = ledgers["sampled_tokens"]
    split = ", ".join(f"{tokens[state]:,} {state.replace('_', ' ')}" for state in STATES)
    lines.append(f"tokens    {sum(tokens.values()):,} sampled: {split}")
    if ledgers["restarts"]:
        back = ", ".join(f"{process} {count}" for process, count in ledgers["restarts"].items())
        lines.append(f"restarts  {back}; {ledgers['regenerated_tokens']:,} tokens sampled again")
    if ledgers["balanced"]:
        return "\n".join([*lines, "balanced"])
    return "\n".join([*lines, "NOT balanced:", *(f"  {problem}" for problem in ledgers["problems"])])
