"""The results of a run: the files summary.json and report.html, and both ledgers.

The summary is computed from journal.db alone, so anybody can recompute it. A number that the journal cannot give is
null, never a guess. The report also shows timeline.json and config.toml. This module computes and draws what the report
shows, and `report.html.jinja` lays it out. The page fetches nothing and runs no script. If a run left something out (an
evaluation, a timeline, its own end), the page says that it is missing and shows the rest.
"""

import math
import os
from collections.abc import Sequence
from datetime import datetime
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from headrace.buffer.reader import JournalReader, open_readonly
from headrace.observe import charts
from headrace.observe.charts import Drawing, Series
from headrace.observe.records import (
    ADVICE,
    SKIPPED_EVALUATION,
    STRETCHES,
    DeliveryRecord,
    EndedGroup,
    EvaluationRecord,
    SampleRecord,
    StepRecord,
)
from headrace.observe.spans import timeline_started
from headrace.observe.summary import (
    STATES,
    compact,
    duration,
    lag_mean_and_max,
    number,
    passes_in_words,
    percent,
    thousands,
    whole,
)
from headrace.review.rollouts import load_chat
from headrace.review.scores import newest_scored
from headrace.run_dir import RunDir, write_whole

MOST_SAMPLES = 8
QUARTERS = 4

Titled = tuple[str, Drawing | None]
"""A title and its drawing; None if there is nothing to draw."""


def summarize(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run that is over, cut short or still running."""
    with open_readonly(RunDir(run_dir).journal) as journal:
        return summarize_journal(journal)


def write_summary(run_dir: Path) -> dict[str, Any]:
    """Write the summary of a run to its `summary.json`, whole or not at all, and return it."""
    summary = summarize(run_dir)
    path = RunDir(run_dir).summary
    part = path.with_suffix(".json.part")
    with part.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return summary


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
    counts = journal.counts()
    groups, rollouts = counts["groups"], counts["rollouts"]
    lag_mean, lag_max = lag_mean_and_max(journal.lag_tokens())
    deliveries = journal.deliveries()
    proved = sum(delivery.proved for delivery in deliveries)
    reasons, reasons_rollouts = groups.pop("reasons"), rollouts.pop("reasons")
    return {
        "name": meta.get("name"),
        "outcome": meta.get("outcome"),
        "heldout_before": next((e.pass_1 for e in evaluations if e.moment == "before"), None),
        "heldout_after": next((e.pass_1 for e in reversed(evaluations) if e.moment == "after"), None),
        **_rewards(steps),
        "train_seconds": _train_seconds(meta.get(STRETCHES) or [], window),
        "tokens_generated": sum(journal.sampled_tokens().values()),
        "tokens_trained": sum(step.trained_tokens for step in steps),
        "tokens_per_second": _rate(steps, window),
        "trainer_idle_fraction": journal.idle_fraction("trainer-*", window) if window else None,
        "engine_idle_fraction": journal.idle_fraction("engine-*", window) if window else None,
        "lag_mean": lag_mean,
        "lag_max": lag_max,
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
        "evaluations": [_evaluation(evaluation) for evaluation in evaluations],
        "advice": sorted(
            (value for key, value in meta.items() if key.startswith(ADVICE)),
            key=lambda told: (told["step"], told["cause"]),
        ),
        "evaluations_skipped": [meta[key] for key in sorted(meta) if key.startswith(SKIPPED_EVALUATION)],
    }


def _evaluation(evaluation: EvaluationRecord) -> dict[str, Any]:
    """Return an evaluation with its JSON read. `tasks`, `passes` and `sets` are there only if they have entries."""
    found = msgspec.structs.asdict(evaluation)
    found |= {key: msgspec.json.decode(found[key]) for key in ("versions", "tasks", "passes", "sets")}
    return {key: value for key, value in found.items() if value or key not in ("tasks", "passes", "sets")}


def _rewards(steps: list[StepRecord]) -> dict[str, float | None]:
    """Return the mean reward of the first and of the last tenth of the policy steps (at least one step)."""
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    if not rewards:
        return {"reward_first": None, "reward_last": None}
    tenth = max(1, len(rewards) // 10)
    return {"reward_first": sum(rewards[:tenth]) / tenth, "reward_last": sum(rewards[-tenth:]) / tenth}


def _train_seconds(stretches: list[list[float]], window: tuple[float, float] | None) -> float | None:
    """Return the seconds in which the run trained: in the stretches before its last resume, and since then."""
    if window is None and not stretches:
        return None
    return float(sum(end - begin for begin, end in [*stretches, *([window] if window else [])]))


def _rate(steps: list[StepRecord], window: tuple[float, float] | None) -> float | None:
    """Return the trained tokens per second of training. For a resumed run, those since the last start count."""
    if window is None or window[1] <= window[0]:
        return None
    tokens = sum(step.trained_tokens for step in steps if step.ended is None or step.ended >= window[0])
    return float(tokens / (window[1] - window[0]))


# ---- the report


def write_report(run_dir: Path) -> Path:
    """Write a run's `report.html`, whole or not at all, and return its path."""
    page = templates().get_template("report.html.jinja").render(values(run_dir))
    path = RunDir(run_dir).report
    write_whole(path, page.encode(errors="replace"))
    return path


@cache
def templates() -> jinja2.Environment:
    """Return the templates beside this file. Everything that they show is escaped, unless they say otherwise."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for format_number in (compact, duration, number, percent, whole, thousands):
        found.filters[format_number.__name__] = format_number
    return found


def values(run_dir: Path) -> dict[str, Any]:
    """Return everything that the template shows, by the names that it uses. The run may still be running."""
    paths = RunDir(run_dir)
    with open_readonly(paths.journal) as journal:
        meta, summary = journal.meta(), summarize_journal(journal)
        steps, lag_tokens, groups = journal.steps(), journal.lag_tokens(), journal.ended_groups()
        figures = journal.step_curves()
        training, deliveries, samples = journal.training_window(), journal.deliveries(), journal.samples()
        scored = newest_scored(journal, partial(load_chat, run_dir))
    ledger, most, bound = summary["ledger"], summary["lag_max"], summary["lag_bound"]
    started = meta.get("started", meta.get("train_started"))
    # Usually one step makes one version, and then both charts share their axis.
    axis = "version" if len({step.version for step in steps}) == len(steps) else "step"
    return {
        "summary": summary,
        "name": str(summary["name"] or run_dir.name),
        "started": None if started is None else datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M"),
        "balanced": ledger["admitted"] == sum(ledger[state] for state in STATES),
        "over_bound": most is not None and bound is not None and most > bound,
        "reward": _reward(steps, axis),
        "heldout": _heldout(summary["evaluations"]),
        "evaluations": [
            [
                f"{e['moment']} training",
                str(e["version"]),
                _in_words(e),
                ", ".join(f"{thousands(tokens)} of {version}" for version, tokens in e["versions"].items()),
            ]
            for e in summary["evaluations"]
        ],
        "unevaluated": [
            [f"version {e['version']}, {e['moment']} training", e["reason"]] for e in summary["evaluations_skipped"]
        ],
        "optimizer": [
            _of_steps(steps, axis, "Loss", "loss", "b", from_zero=False),
            _of_steps(steps, axis, "Gradient norm", "grad_norm", "c"),
            _of_steps(steps, axis, "Seconds per step", "seconds", "a"),
            _of_steps(steps, axis, "Learning rate", "learning_rate", "d"),
        ],
        "curves": _curves([getattr(step, axis) for step in steps], figures, axis, meta.get("tasks") or []),
        "lag": charts.lag_chart(lag_tokens, None if bound is None else int(bound)),
        "lag_facts": _lag_facts(lag_tokens, summary),
        "groups": groups,
        "composition": [
            ("By length", "tokens of an answer", _composition(quarters(groups, "tokens"))),
            ("By difficulty", "mean reward", _composition(quarters(groups, "reward"))),
            ("By outcome", "outcome", _composition(outcomes(groups))),
        ],
        "processes": _processes(paths.timeline, training, steps, ended=meta.get("train_ended") is not None),
        "ledgers": [
            [what, *[thousands(summary[key][state]) for state in ("admitted", *STATES)]]
            for what, key in (("groups", "ledger"), ("rollouts", "ledger_rollouts"))
        ],
        "reasons": [
            [reason or "no reason recorded", f"{what} {state}", thousands(count)]
            for what, reasons in (("groups", summary["reasons"]), ("rollouts", summary["reasons_rollouts"]))
            for state in ("dropped", "failed")
            for reason, count in reasons[state].items()
        ],
        "deliveries": [
            _of_deliveries(deliveries, title, column, unit)
            for title, column, unit in (
                ("Canary error", "canary_error", "nats"),
                ("Time to stage", "stage_seconds", "s"),
                ("Time to swap", "swap_seconds", "s"),
            )
            if deliveries
        ],
        "refused": [
            [f"version {row.version} on {row.engine}: {row.reason}", "quarantined" if row.quarantined else "rejected"]
            for row in deliveries
            if not row.proved
        ],
        "samples": _samples(samples),
        "scored": scored,
        "config": paths.config.read_text(encoding="utf-8", errors="replace") if paths.config.is_file() else None,
    }


# ---- learning


def _reward(steps: Sequence[StepRecord], axis: str) -> Drawing | None:
    points = charts.finite([(getattr(step, axis), step.reward_mean) for step in steps])
    if not points:
        return None
    window = max(1, min(50, len(points) // 20))
    each = Series(label=f"reward, {axis}", points=points, tone="faint" if window > 1 else "a")
    mean = Series(label=f"mean of {window}", points=charts.moving_mean(points, window), hover=False)
    # The mean is drawn first, because marks that react to the pointer must be on top.
    lines = [mean, each] if window > 1 else [each]
    chart = charts.line_chart(lines, name="Reward by step", x_label=axis, y_label="mean reward")
    keys = [("faint", "each step"), ("a", f"mean of {window} steps")] if window > 1 else [("a", "each step")]
    return Drawing(chart, keys)


def _in_words(evaluation: dict[str, Any]) -> str:
    """Return the accuracy of an evaluation, its other figures (such as pass@k), and the accuracy by task and by set."""
    words = [number(evaluation["pass_1"]), *passes_in_words(evaluation.get("passes", {}))]
    words += [f"{task} {number(found['pass_1'])}" for task, found in evaluation.get("tasks", {}).items()]
    for name, found in evaluation.get("sets", {}).items():
        words.append(" ".join([f"{name} {number(found['pass_1'])}", *passes_in_words(found)]))
    return ", ".join(words)


def _heldout(evaluations: list[dict[str, Any]]) -> Drawing | None:
    if not evaluations:
        return None
    prompts = " or ".join(thousands(count) for count in sorted({e["prompts"] for e in evaluations}))
    k = max(e["samples"] for e in evaluations)
    shown = [("pass@1", "pass_1", "b", f"pass@1 on {prompts} prompts")]
    if k > 1:
        shown.append((f"pass@{k}", "pass_k", "c", f"pass@{k}"))
    lines = []
    for label, column, tone, _ in shown:
        points = sorted(charts.finite([(e["version"], e[column]) for e in evaluations]))
        lines.append(Series(label=f"{label}, version", points=points, tone=tone, dots=True))
    parts = [(e["version"], {**e.get("tasks", {}), **e.get("sets", {})}) for e in evaluations]
    for name, tone in zip(sorted({name for _, found in parts for name in found}), "adefgh", strict=False):
        points = sorted((version, found[name]["pass_1"]) for version, found in parts if name in found)
        lines.append(Series(label=f"{name}, version", points=points, tone=tone, dots=True))
        shown.append((name, "", tone, f"{name}, pass@1"))
    chart = charts.line_chart(
        lines, name="Held-out accuracy", x_label="version", y_label="accuracy", y_range=(0.0, 1.02)
    )
    return Drawing(chart, [(tone, key) for _, _, tone, key in shown])


def _of_steps(
    steps: Sequence[StepRecord], axis: str, title: str, column: str, tone: str, *, from_zero: bool = True
) -> Titled:
    points = charts.finite([(getattr(step, axis), getattr(step, column)) for step in steps])
    if not points:
        return title, None
    line = Series(label=f"{title.lower()}, {axis}", points=points, tone=tone)
    chart = charts.line_chart([line], name=title, x_label=axis, width=400, height=210, from_zero=from_zero)
    return title, Drawing(chart)


CURVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward of each task", ("reward",)),
    ("Scores", ("score/",)),
    ("Further numbers of the reward", ("extra/",)),
    ("Answer length in tokens", ("length_mean", "length_max")),
    ("Truncated answers", ("truncated",)),
    ("Groups with equal rewards", ("zero_variance",)),
    ("Entropy", ("entropy", "sampled_entropy")),
    ("KL divergence", ("kl_k1", "kl_k3", "reference_kl", "reward_kl", "teacher_kl")),
    ("Components of the loss", ("loss/",)),
    ("Weight of the entropy bonus", ("entropy_weight",)),
    ("Value and error of the critic", ("value", "value_loss")),
    ("Importance ratio", ("ratio",)),
    ("Clip fraction", ("clip_fraction",)),
    ("Lag in versions", ("lag_mean", "lag_max")),
    ("Idle share", ("trainer_idle", "engine_idle")),
    ("Tokens per second", ("tokens_per_second", "generated_per_second")),
)
"""The charts of the report's curves: a title, and the keys of the lines. `score/` draws every key that begins with
`score/`. If the run has several tasks, each key is also drawn with the name of each task before it."""
SIGNED = ("score/", "extra/", "kl_k1", "ratio", "reference_kl", "reward_kl", "teacher_kl", "loss/", "value")
"""The curves that may be negative, or whose change matters more than their distance from zero."""
MOST_LINES = 8


def _curves(
    xs: Sequence[float], figures: Sequence[dict[str, float | None]], axis: str, tasks: Sequence[str]
) -> list[Titled]:
    """Draw the curves that the run has."""
    prefixes = ("", *(f"{task}/" for task in tasks))
    # The scores of a task's own reward function are among the curves of the task.
    again = tuple(f"score/{task}/" for task in tasks)
    present = sorted({key for step in figures for key in step if not key.startswith(again)})
    drawn: list[Titled] = []
    for title, wanted in CURVES:
        wishes = [prefix + want for prefix in prefixes for want in wanted]
        keys = [key for wish in wishes for key in present if (key.startswith(wish) if wish[-1] == "/" else key == wish)]
        lines = []
        for key, tone in zip(keys[:MOST_LINES], "abcdefgh", strict=False):
            points = charts.finite([(x, step.get(key)) for x, step in zip(xs, figures, strict=True)])
            if points:
                lines.append(Series(label=f"{_label(key, wanted)}, {axis}", points=points, tone=tone))
        if not lines:
            continue
        zero = not any(want in SIGNED for want in wanted)
        chart = charts.line_chart(lines, name=title, x_label=axis, width=400, height=210, from_zero=zero)
        drawn.append((title, Drawing(chart, [(line.tone, line.label.rpartition(",")[0]) for line in lines])))
    return drawn


def _label(key: str, wanted: Sequence[str]) -> str:
    """Return the name of a curve in its chart, without the part that the chart's title already gives."""
    for want in wanted:
        if want.endswith("/"):
            key = key.replace(want, "", 1)
    return key


def _lag_facts(tokens: dict[int, int], summary: dict[str, Any]) -> list[list[str]]:
    bound = summary["lag_bound"]
    over = sum(count for lag, count in tokens.items() if bound is not None and lag > bound)
    return [
        ["tokens trained", thousands(sum(tokens.values()))],
        ["tokens at lag 0", thousands(tokens.get(0, 0))],
        ["tokens over the bound", "no bound recorded" if bound is None else thousands(over)],
        ["mean lag", number(summary["lag_mean"], 3)],
        ["largest lag", whole(summary["lag_max"])],
    ]


# ---- composition: which groups were trained and which were not. Survivor bias would show here.


def quarters(groups: Sequence[EndedGroup], key: str) -> list[tuple[str, list[EndedGroup]]]:
    """Split the groups into up to four parts of about equal size, by the number `key`. Equal numbers stay together."""

    def of(group: EndedGroup) -> float:
        return float(getattr(group, key))

    known = sorted((group for group in groups if getattr(group, key) is not None), key=of)
    cuts = [of(known[len(known) * part // QUARTERS]) for part in range(1, QUARTERS)] if known else []
    edges = [float("-inf"), *sorted(set(cuts)), float("inf")]
    parts = [[group for group in known if low <= of(group) < high] for low, high in pairwise(edges)]
    spans = [(of(part[0]), of(part[-1]), part) for part in parts if part]
    return [(f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}", part) for low, high, part in spans]


def outcomes(groups: Sequence[EndedGroup]) -> list[tuple[str, list[EndedGroup]]]:
    """Return the groups by how they ended, the most frequent ending first."""
    ends: dict[str, list[EndedGroup]] = {}
    for group in groups:
        ends.setdefault(group.state if group.state == "trained" else group.reason, []).append(group)
    return sorted(ends.items(), key=lambda item: (-len(item[1]), item[0]))


def _composition(parts: list[tuple[str, list[EndedGroup]]]) -> list[list[str]]:
    """Return a line for each part: its size, the trained fraction, and the means over its groups."""
    return [
        [
            name,
            thousands(len(part)),
            percent(sum(group.state == "trained" for group in part) / len(part)),
            *[number(_mean(part, key), 2) for key in ("tokens", "reward", "age", "seconds")],
        ]
        for name, part in parts
    ]


def _mean(part: list[EndedGroup], key: str) -> float | None:
    found = [float(value) for group in part if (value := getattr(group, key)) is not None]
    return sum(found) / len(found) if found else None


# ---- processes


def _processes(
    timeline: Path, training: tuple[float, float] | None, steps: Sequence[StepRecord], *, ended: bool
) -> list[Titled]:
    """Draw the timeline, whole and for a few seconds; empty if the run left none."""
    if not timeline.exists():
        return []
    started = timeline_started(timeline)
    inside = None
    if started is not None and training is not None:
        inside = (training[0] - started, training[1] - started)
    activity = charts.read_activity(timeline, _window(inside, steps))
    if activity is None:
        return []
    marks = []
    if inside is not None:
        marks = [(max(0.0, inside[0]), "training begins")]
        if ended:
            marks.append((min(inside[1], activity.seconds), "ends"))
    begin, end = activity.window
    return [
        ("Whole run, busy fraction", charts.overview(activity, marks)),
        (f"A close look: {end - begin:.1f} s from {duration(begin)} on", charts.close_up(activity)),
    ]


def _window(training: tuple[float, float] | None, steps: Sequence[StepRecord]) -> tuple[float, float] | None:
    """Choose 2 to 10 seconds from the middle of training, which hold a few optimizer steps."""
    if training is None or training[1] <= training[0]:
        return None
    taken = sorted(step.seconds for step in steps if step.seconds)
    typical = taken[len(taken) // 2] if taken else 1.0
    half = min(10.0, max(2.0, 4 * typical), training[1] - training[0]) / 2
    middle = (training[0] + training[1]) / 2
    return max(0.0, middle - half), middle + half


# ---- deliveries and samples


def _of_deliveries(deliveries: Sequence[DeliveryRecord], title: str, column: str, unit: str) -> Titled:
    """Draw one number of all deliveries over versions, with a line for each engine: at most seven engines are drawn."""
    numbers = [(row, number) for row in deliveries if (number := getattr(row, column)) is not None]
    known = [(row, number) for row, number in numbers if math.isfinite(number)]
    strange = f", not finite in {len(numbers) - len(known):,}" if len(known) < len(numbers) else ""
    if not known:
        return f"{title}{strange.replace(',', ' ·', 1)}", None
    most = max(number for _, number in known)
    if most == 0.0 and unit == "nats":
        share = f"{len(known):,} of {len(numbers):,}" if strange else f"all {len(known):,}"
        return f"{title} · 0 in {share} deliveries{strange}", None
    unit, scale = ("ms", 1e3) if unit == "s" and most < 1 else (unit, 1.0)
    engines = sorted({row.engine for row, _ in known}, key=lambda name: (len(name), name))
    series = []
    for engine, tone in zip(engines, tones := "dfacbeg", strict=False):
        points = sorted((float(row.version), scale * number) for row, number in known if row.engine == engine)
        series.append(Series(label=f"{engine}, version", points=points, tone=tone))
    chart = charts.line_chart(
        series, name=title, x_label="version", y_label=unit, width=400, height=210, from_zero=True
    )
    keys = [(line.tone, line.label.split(",")[0]) for line in series] if len(series) > 1 else []
    largest = f"{scale * most:.1f}" if unit == "ms" else charts.tick_label(most)
    hidden = f", {len(tones)} of {len(engines)} engines drawn" if len(engines) > len(tones) else ""
    return f"{title} · at most {largest} {unit}{strange}{hidden}", Drawing(chart, keys)


def _samples(samples: Sequence[SampleRecord]) -> list[dict[str, list[SampleRecord]]]:
    """Return the samples of a few prompts, by the moment of their answers: `before` and `after` training."""
    prompts: dict[str, dict[str, list[SampleRecord]]] = {}
    for sample in samples:
        prompts.setdefault(sample.prompt, {"before": [], "after": []})[sample.moment].append(sample)
    # Prompts that were answered at both moments come first; otherwise the order of recording stays.
    return sorted(prompts.values(), key=lambda moments: not (moments["before"] and moments["after"]))[:MOST_SAMPLES]
