"""The page of a run, drawn from plain data. The page fetches nothing and runs no script.

If a run left something out (an evaluation, a timeline, its own end), the page says that it is missing and shows the
rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe import charts, gantt
from headrace.observe.charts import Series
from headrace.observe.clock import compact, duration
from headrace.observe.composition import composition
from headrace.observe.curves import lag, learning
from headrace.observe.ledgers import STATES
from headrace.observe.page import card, columns, nothing, page, section, stack, table, tile
from headrace.observe.records import DeliveryRecord, EndedGroup, SampleRecord, StepRecord
from headrace.observe.summary import number, percent, whole
from headrace.observe.timeline import timeline_started

MOST_SAMPLES = 8
NO_ANSWER = '<span class="soft">no answer recorded</span>'


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The data of the page."""

    directory: str
    """The name of the run's directory, for a run without a name."""
    meta: dict[str, Any]
    """The journal's facts about the run."""
    summary: dict[str, Any]
    """The summary, as in `summary.json`."""
    steps: Sequence[StepRecord]
    lag_tokens: dict[int, int]
    groups: Sequence[EndedGroup]
    training: tuple[float, float] | None
    """When training began and ended."""
    deliveries: Sequence[DeliveryRecord]
    samples: Sequence[SampleRecord]
    timeline: Path
    """The path of timeline.json, which may be missing."""
    config: str | None
    """The text of the resolved configuration."""


def draw(report: Report) -> str:
    """Return the whole page."""
    summary = report.summary
    name = str(summary["name"] or report.directory)
    body = [
        _header(name, report.meta, summary),
        _tiles(summary),
        learning(report.steps, summary),
        lag(report.lag_tokens, summary),
        composition(report.groups),
        _processes(report.timeline, report.meta, report.training, report.steps),
        _ledgers(summary),
        _deliveries(report.deliveries),
        _samples(report.samples),
        _config(report.config),
        "<footer>Computed from journal.db, timeline.json and config.toml in the run's directory.</footer>",
    ]
    return page(f"{name} · Headrace", "".join(body))


def _header(name: str, meta: dict[str, Any], summary: dict[str, Any]) -> str:
    outcome = summary["outcome"]
    tone = "" if outcome is None else "good" if outcome == "finished" else "bad"
    pill = f'<span class="pill {tone}">{escape(str(outcome or "no end recorded"))}</span>'
    facts = [f"{summary['steps']:,} optimizer steps", f"{compact(summary['tokens_generated'])} tokens generated"]
    started = meta.get("started", meta.get("train_started"))
    if started is not None:
        facts.insert(0, datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M"))
    if summary["warm_start_steps"]:
        facts.append(f"{summary['warm_start_steps']:,} supervised steps before")
    if summary["train_seconds"] is not None:
        facts.append(f"{duration(summary['train_seconds'])} of training")
    head = f'<header><h1>{escape(name)}</h1>{pill}<div class="soft">{escape(" · ".join(facts))}</div></header>'
    if outcome is not None:
        return head
    return head + '<p class="notice">The journal holds no end of this run: it is still going, or it was cut short.</p>'


def _tiles(summary: dict[str, Any]) -> str:
    ledger, rate, rejected = summary["ledger"], summary["tokens_per_second"], summary["deliveries_rejected"]
    balanced = ledger["admitted"] == sum(ledger[state] for state in STATES)
    speed = "unknown" if rate is None else compact(rate)
    trained = f"{compact(summary['tokens_trained'])} in all"
    engine = f"engine {percent(summary['engine_idle_fraction'])}"
    tiles = [
        _heldout_tile(summary),
        tile("Versions published", f"{summary['versions']:,}", f"{summary['steps']:,} policy steps"),
        tile("Trained tokens per second", speed, trained),
        tile("Trainer idle", percent(summary["trainer_idle_fraction"]), engine),
        _lag_tile(summary),
        tile("Ledger of groups", "balanced" if balanced else "broken", f"{ledger['admitted']:,} admitted"),
        tile("Deliveries proved", f"{summary['deliveries_proved']:,}", f"{rejected:,} rejected"),
    ]
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _heldout_tile(summary: dict[str, Any]) -> str:
    before, after = summary["heldout_before"], summary["heldout_after"]
    value, note = "not evaluated", "no accuracy before or after was recorded"
    if before is not None or after is not None:
        value = f'{number(before)}<span class="to">→</span>{number(after)}'
        note = "pass@1 on prompts never trained on"
    return tile("Held-out accuracy, before and after", value, note, wide=True)


def _lag_tile(summary: dict[str, Any]) -> str:
    mean, most, bound = summary["lag_mean"], summary["lag_max"], summary["lag_bound"]
    value = "none" if mean is None else f'{mean:.2f}<span class="to">/</span>{most}'
    note = f"bound {whole(bound)}"
    if most is not None and bound is not None and most > bound:
        note += ": broken"
    return tile("Lag, mean and max", value, note)


def _processes(
    path: Path, meta: dict[str, Any], training: tuple[float, float] | None, steps: Sequence[StepRecord]
) -> str:
    lead = "What is not filled is idle. The whole timeline, span by span, is timeline.json: open it in ui.perfetto.dev."
    started = timeline_started(path) if path.exists() else None
    inside = None
    if started is not None and training is not None:
        inside = (training[0] - started, training[1] - started)
    activity = gantt.read_activity(path, _window(inside, steps)) if path.exists() else None
    if activity is None:
        return section("Processes", lead, card("Whole run", nothing("This run left no timeline.")))
    marks = []
    if inside is not None:
        marks = [(max(0.0, inside[0]), "training begins")]
        if meta.get("train_ended") is not None:
            marks.append((min(inside[1], activity.seconds), "ends"))
    begin, end = activity.window
    near = f"A close look: {end - begin:.1f} s from {duration(begin)} on"
    return section(
        "Processes",
        lead,
        stack(card("Whole run, busy fraction", gantt.overview(activity, marks)), card(near, gantt.close_up(activity))),
    )


def _window(training: tuple[float, float] | None, steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Choose 2 to 10 seconds from the middle of training, which hold a few optimizer steps."""
    if training is None or training[1] <= training[0]:
        return None
    taken = sorted(step.seconds for step in steps if step.seconds)
    typical = taken[len(taken) // 2] if taken else 1.0
    half = min(10.0, max(2.0, 4 * typical), training[1] - training[0]) / 2
    middle = (training[0] + training[1]) / 2
    return max(0.0, middle - half), middle + half


def _ledgers(summary: dict[str, Any]) -> str:
    lead = "Whatever was admitted is in exactly one state: admitted = trained + dropped + failed + in flight."
    ledgers = {"groups": summary["ledger"], "rollouts": summary["ledger_rollouts"]}
    head = ["", "admitted", *[state.replace("_", " ") for state in STATES]]
    lines = [[what, *[f"{ledger[key]:,}" for key in ("admitted", *STATES)]] for what, ledger in ledgers.items()]
    why = [
        [reason or "no reason recorded", f"{what} {state}", f"{count:,}"]
        for what, reasons in (("groups", summary["reasons"]), ("rollouts", summary["reasons_rollouts"]))
        for state in ("dropped", "failed")
        for reason, count in reasons[state].items()
    ]
    reasons = (
        table(["reason", "what", "count"], why, left=2) if why else nothing("Nothing was dropped and nothing failed.")
    )
    return section("Ledger", lead, stack(card("Conservation", table(head, lines)), card("Dropped and failed", reasons)))


def _deliveries(deliveries: Sequence[DeliveryRecord]) -> str:
    lead = "Each engine proves each version: by the digest of its weights, and by a canary scored as by the trainer."
    if not deliveries:
        return section("Deliveries", lead, card("Proofs", nothing("No delivery was recorded.")))
    cards = [
        _delivery_card(deliveries, "Canary error", "canary_error", "nats"),
        _delivery_card(deliveries, "Time to stage", "stage_seconds", "s"),
        _delivery_card(deliveries, "Time to swap", "swap_seconds", "s"),
    ]
    refused = [row for row in deliveries if not row.proved]
    lines = [
        [
            f"version {row.version} on {row.engine}: {row.reason}",
            "quarantined" if row.quarantined else "rejected",
        ]
        for row in refused[:20]
    ]
    block = [card(f"{len(refused)} refused", table(["what", "result"], lines, left=2))] if refused else []
    return section("Deliveries", lead, stack(columns(*cards), *block))


def _delivery_card(deliveries: Sequence[DeliveryRecord], title: str, column: str, unit: str) -> str:
    """Draw one number of all deliveries over versions, with a line for each engine."""
    engines = sorted({row.engine for row in deliveries})[:7]
    series = []
    for engine, tone in zip(engines, "dfacbeg", strict=False):
        points = charts.finite([(row.version, getattr(row, column)) for row in deliveries if row.engine == engine])
        if points:
            series.append(Series(label=f"{engine}, version", points=sorted(points), tone=tone))
    if not series:
        return card(title, nothing("Not recorded."))
    most = max(y for line in series for _, y in line.points)
    chart = charts.line_chart(series, name=title, x_label="version", width=400, height=210, from_zero=True)
    keys = charts.legend([(line.tone, line.label.split(",")[0]) for line in series]) if len(series) > 1 else ""
    largest = f"{1e3 * most:.1f} ms" if unit == "s" and most < 1 else f"{charts.tick_label(most)} {unit}"
    return card(f"{title} · at most {largest}", chart + keys)


def _samples(samples: Sequence[SampleRecord]) -> str:
    lead = "The same held-out prompts, answered before the first and after the last version."
    if not samples:
        return section("Sample rollouts", lead, card("Before and after", nothing("No samples were recorded.")))
    prompts: dict[str, dict[str, list[SampleRecord]]] = {}
    for sample in samples:
        prompts.setdefault(sample.prompt, {"before": [], "after": []})[sample.moment].append(sample)
    # Prompts that were answered at both moments come first; otherwise the order of recording stays.
    chosen = sorted(prompts.values(), key=lambda moments: not (moments["before"] and moments["after"]))[:MOST_SAMPLES]
    body = "".join(_sample_row(moments) for moments in chosen)
    head = "<thead><tr><th>prompt</th><th>before</th><th>after</th></tr></thead>"
    return section(
        "Sample rollouts", lead, f'<div class="card"><table class="samples">{head}<tbody>{body}</tbody></table></div>'
    )


def _sample_row(moments: dict[str, list[SampleRecord]]) -> str:
    question = (moments["before"] or moments["after"])[0].question
    cells = [f'<td><div class="said">{escape(question)}</div></td>']
    for moment in ("before", "after"):
        answers = "".join(_answer(sample) for sample in moments[moment][:2])
        cells.append(f"<td>{answers or NO_ANSWER}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _answer(sample: SampleRecord) -> str:
    reward = sample.reward
    tone = "" if reward is None else "good" if reward >= 1 else "bad" if reward <= 0 else ""
    label = "not judged" if reward is None else f"reward {reward:.3g}"
    return f'<div class="said">{escape(sample.answer)}</div><span class="badge {tone}">{label}</span>'


def _config(text: str | None) -> str:
    if text is None:
        return '<p class="soft missing">This run left no config.toml.</p>'
    return f"<details><summary>Resolved configuration</summary><pre>{escape(text)}</pre></details>"
