"""summary.json: what a run came to, computed from journal.db alone, so that anybody can compute it again.

A number that the journal cannot give is null, never a guess.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe.clock import compact, duration
from headrace.observe.ledgers import count_reasons, count_states, ledger_line
from headrace.observe.records import (
    Row,
    lag_tokens,
    one,
    open_journal,
    policy_steps,
    read_meta,
    rows,
    training_window,
)

SUMMARY = "summary.json"


def summarize(run_dir: Path) -> dict[str, Any]:
    """The summary of a run, whether it is over, cut short or under way."""
    with open_journal(run_dir) as db:
        return summarize_journal(db)


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Summarize a run into its `summary.json`, never leaving half of one, and return it."""
    summary = summarize(run_dir)
    whole = run_dir / SUMMARY
    part = whole.with_suffix(".json.part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(whole)
    return summary


def summarize_journal(db: sqlite3.Connection) -> dict[str, Any]:
    """The summary of an open journal."""
    meta = read_meta(db)
    window = training_window(db, meta)
    seconds = window[1] - window[0] if window else None
    steps = policy_steps(db)
    trained = sum(step["trained_tokens"] for step in steps)
    evaluations = rows(db, "SELECT * FROM evaluations ORDER BY ended, version")
    return {
        "name": meta.get("name"),
        "outcome": meta.get("outcome"),
        "heldout_before": next((e["pass_1"] for e in evaluations if e["moment"] == "before"), None),
        "heldout_after": next((e["pass_1"] for e in reversed(evaluations) if e["moment"] == "after"), None),
        **_rewards(steps),
        "train_seconds": seconds,
        "tokens_generated": one(db, "SELECT COALESCE(SUM(sampled_tokens), 0) AS n FROM rollouts")["n"],
        "tokens_trained": trained,
        "tokens_per_second": _rate(steps, window),
        "trainer_idle_fraction": _idle(db, "trainer-*", window),
        "engine_idle_fraction": _idle(db, "engine-*", window),
        **_lag(db),
        "lag_bound": meta.get("lag_bound"),
        "no_mps": meta.get("no_mps"),
        "ledger": count_states(db, "groups"),
        "ledger_rollouts": count_states(db, "rollouts"),
        "reasons": count_reasons(db, "groups"),
        "reasons_rollouts": count_reasons(db, "rollouts"),
        "steps": len(steps),
        "warm_start_steps": one(db, "SELECT COUNT(*) AS n FROM steps WHERE objective = 'imitation'")["n"],
        "versions": one(db, "SELECT COUNT(*) AS n FROM versions")["n"],
        **_deliveries(db),
        "evaluations": evaluations,
    }


def _rewards(steps: list[Row]) -> dict[str, float | None]:
    """The mean reward of the first and of the last tenth of the policy steps (at least one step)."""
    rewards = [step["reward_mean"] for step in steps if step["reward_mean"] is not None]
    if not rewards:
        return {"reward_first": None, "reward_last": None}
    tenth = max(1, len(rewards) // 10)
    return {"reward_first": sum(rewards[:tenth]) / tenth, "reward_last": sum(rewards[-tenth:]) / tenth}


def _rate(steps: list[Row], window: tuple[float, float] | None) -> float | None:
    """Trained tokens per second of training; a resumed run's window is its last session, and so are the tokens."""
    if window is None or window[1] <= window[0]:
        return None
    tokens = sum(step["trained_tokens"] for step in steps if step["ended"] is None or step["ended"] >= window[0])
    return float(tokens / (window[1] - window[0]))


def _idle(db: sqlite3.Connection, processes: str, window: tuple[float, float] | None) -> float | None:
    """The idle share of these processes' time in the window; an interval on its border counts by its share inside."""
    if window is None:
        return None
    query = """
        WITH clipped AS (
            SELECT busy_seconds, ended - started AS whole, MIN(ended, :end) - MAX(started, :begin) AS inside
            FROM activity
            WHERE process GLOB :processes AND ended > started AND ended > :begin AND started < :end
        )
        SELECT SUM(busy_seconds * inside / whole) AS busy, SUM(inside) AS elapsed FROM clipped
    """
    row = one(db, query, processes=processes, begin=window[0], end=window[1])
    if not row["elapsed"]:
        return None
    idle = 1.0 - float(row["busy"]) / float(row["elapsed"])
    return min(1.0, max(0.0, idle))


def _lag(db: sqlite3.Connection) -> dict[str, float | int | None]:
    """Over tokens, not over steps: a long answer weighs what it weighs in the loss."""
    tokens = {lag: count for lag, count in lag_tokens(db).items() if count > 0}
    total = sum(tokens.values())
    if not total:
        return {"lag_mean": None, "lag_max": None}
    return {"lag_mean": sum(lag * count for lag, count in tokens.items()) / total, "lag_max": max(tokens)}


def _deliveries(db: sqlite3.Connection) -> dict[str, int]:
    query = "SELECT COUNT(*) AS n, COALESCE(SUM(accepted AND NOT quarantined), 0) AS proved FROM deliveries"
    row = one(db, query)
    return {"deliveries_proved": row["proved"], "deliveries_rejected": row["n"] - row["proved"]}


def describe(summary: dict[str, Any]) -> str:
    """A summary for people: a few aligned lines."""
    lines = [
        ("run", f"{summary['name'] or 'unnamed'} ({summary['outcome'] or 'no end recorded'})"),
        ("held-out", f"{number(summary['heldout_before'])} -> {number(summary['heldout_after'])}"),
        ("reward", f"{number(summary['reward_first'])} -> {number(summary['reward_last'])}"),
        ("training", _training_line(summary)),
        ("tokens", f"{compact(summary['tokens_generated'])} generated, {compact(summary['tokens_trained'])} trained"),
        ("idle", _idle_line(summary)),
        ("lag", _lag_line(summary)),
        ("groups", ledger_line(summary["ledger"])),
        ("rollouts", ledger_line(summary["ledger_rollouts"])),
        ("deliveries", f"{summary['deliveries_proved']} proved, {summary['deliveries_rejected']} rejected"),
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number with a fixed count of decimals, or `none`."""
    return "none" if value is None else f"{value:.{digits}f}"


def whole(value: float | None) -> str:
    """An integer, or `none`."""
    return "none" if value is None else f"{value:.0f}"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage, or `unknown`."""
    return "unknown" if fraction is None else f"{100 * fraction:.1f}%"


def _training_line(summary: dict[str, Any]) -> str:
    text = f"{summary['versions']} versions, {summary['steps']} steps"
    if summary["train_seconds"] is None:
        return text
    text += f" in {duration(summary['train_seconds'])}"
    rate = summary["tokens_per_second"]
    return text if rate is None else f"{text}, {compact(rate)} trained tokens/s"


def _idle_line(summary: dict[str, Any]) -> str:
    return f"trainer {percent(summary['trainer_idle_fraction'])}, engine {percent(summary['engine_idle_fraction'])}"


def _lag_line(summary: dict[str, Any]) -> str:
    most, bound = whole(summary["lag_max"]), whole(summary["lag_bound"])
    return f"mean {number(summary['lag_mean'], 2)}, max {most}, bound {bound}"
