"""The results of a run: the files summary.json and report.html, and both ledgers.

The summary is computed from journal.db alone, so anybody can recompute it. A number that the journal cannot give is
null, never a guess. The report also shows timeline.json and config.toml.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from headrace.buffer.reader import JournalReader, open_readonly
from headrace.observe.records import StepRecord
from headrace.observe.report import Report, draw
from headrace.run_dir import RunDir


def summarize(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that is over, cut short or still running."""
    with open_readonly(RunDir(run_dir).journal) as journal:
        return summarize_journal(journal)


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Write the summary of a run to its `summary.json`, whole or not at all, and return it."""
    summary = summarize(run_dir)
    whole = RunDir(run_dir).summary
    part = whole.with_suffix(".json.part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(whole)
    return summary


def write_report(run_dir: Path) -> Path:
    """Write a run's `report.html`, whole or not at all, and return its path."""
    page = draw(read_report(run_dir))
    whole = RunDir(run_dir).report
    part = whole.with_suffix(".html.part")
    part.write_text(page, encoding="utf-8", errors="replace")
    part.replace(whole)
    return whole


def read_report(run_dir: Path) -> Report:
    """Read the data of the page of a run that is over, cut short or still running."""
    paths = RunDir(run_dir)
    with open_readonly(paths.journal) as journal:
        return Report(
            directory=run_dir.name,
            meta=journal.meta(),
            summary=summarize_journal(journal),
            steps=journal.steps(),
            lag_tokens=journal.lag_tokens(),
            groups=journal.ended_groups(),
            training=journal.training_window(),
            deliveries=journal.deliveries(),
            samples=journal.samples(),
            timeline=paths.timeline,
            config=paths.config.read_text(encoding="utf-8", errors="replace") if paths.config.is_file() else None,
        )


def read_ledgers(run_dir: Path) -> dict[str, Any]:
    """Read both ledgers of a run that is over, cut short or still running. `problems` is empty if they balance."""
    with open_readonly(RunDir(run_dir).journal) as journal:
        meta = journal.meta()
        problems = journal.imbalances()
        return {
            "name": meta.get("name"),
            "outcome": meta.get("outcome"),
            **journal.counts(),
            "sampled_tokens": journal.sampled_tokens(),
            "regenerated_tokens": journal.regenerated_tokens(),
            "restarts": journal.restarts(),
            "balanced": not problems,
            "problems": problems,
        }


def summarize_journal(journal: JournalReader) -> dict[str, Any]:
    """Return the summary of an open journal."""
    meta = journal.meta()
    window = journal.training_window()
    steps = journal.steps()
    evaluations = journal.evaluations()
    deliveries = journal.deliveries()
    proved = sum(delivery.proved for delivery in deliveries)
    groups, rollouts = journal.ledger("groups").as_dict(), journal.ledger("rollouts").as_dict()
    reasons, reasons_rollouts = groups.pop("reasons"), rollouts.pop("reasons")
    return {
        "name": meta.get("name"),
        "outcome": meta.get("outcome"),
        "heldout_before": next((e.pass_1 for e in evaluations if e.moment == "before"), None),
        "heldout_after": next((e.pass_1 for e in reversed(evaluations) if e.moment == "after"), None),
        **_rewards(steps),
        "train_seconds": window[1] - window[0] if window else None,
        "tokens_generated": sum(journal.sampled_tokens().values()),
        "tokens_trained": sum(step.trained_tokens for step in steps),
        "tokens_per_second": _rate(steps, window),
        "trainer_idle_fraction": journal.idle_fraction("trainer-*", window) if window else None,
        "engine_idle_fraction": journal.idle_fraction("engine-*", window) if window else None,
        **_lag(journal.lag_tokens()),
        "lag_bound": meta.get("lag_bound"),
        "no_mps": meta.get("no_mps"),
        "ledger": groups,
        "ledger_rollouts": rollouts,
        "reasons": reasons,
        "reasons_rollouts": reasons_rollouts,
        "steps": len(steps),
        "warm_start_steps": journal.warm_start_steps(),
        "versions": len(journal.versions()),
        "deliveries_proved": proved,
        "deliveries_rejected": len(deliveries) - proved,
        "evaluations": [msgspec.structs.asdict(evaluation) for evaluation in evaluations],
    }


def _rewards(steps: list[StepRecord]) -> dict[str, float | None]:
    """Return the mean reward of the first and of the last tenth of the policy steps (at least one step)."""
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    if not rewards:
        return {"reward_first": None, "reward_last": None}
    tenth = max(1, len(rewards) // 10)
    return {"reward_first": sum(rewards[:tenth]) / tenth, "reward_last": sum(rewards[-tenth:]) / tenth}


def _rate(steps: list[StepRecord], window: tuple[float, float] | None) -> float | None:
    """Return the trained tokens per second of training.

    For a resumed run, time and tokens are those since the last start.
    """
    if window is None or window[1] <= window[0]:
        return None
    tokens = sum(step.trained_tokens for step in steps if step.ended is None or step.ended >= window[0])
    return float(tokens / (window[1] - window[0]))


def _lag(lag_tokens: dict[int, int]) -> dict[str, float | int | None]:
    """Return the lag averaged over tokens, not over steps, so that an answer weighs as much as in the loss."""
    tokens = {lag: count for lag, count in lag_tokens.items() if count > 0}
    total = sum(tokens.values())
    if not total:
        return {"lag_mean": None, "lag_max": None}
    return {"lag_mean": sum(lag * count for lag, count in tokens.items()) / total, "lag_max": max(tokens)}
