"""The report's curves: what was learned, and how old the trained tokens were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.observe import charts
from headrace.observe.charts import Series
from headrace.observe.page import card, columns, nothing, section, stack, table
from headrace.observe.records import StepRecord
from headrace.observe.summary import number, whole

Row = dict[str, Any]
"""An evaluation, as it stands in the summary."""


def learning(steps: Sequence[StepRecord], summary: dict[str, Any]) -> str:
    """Draw the section with reward, held-out accuracy and the optimizer's own numbers."""
    # Usually one step makes one version, and then both charts share their axis.
    axis = "version" if len({step.version for step in steps}) == len(steps) else "step"
    lead = "Reward of the trained rollouts, and accuracy on held-out prompts, which never enter the buffer."
    small = [
        ("Loss", "loss", "b", False),
        ("Gradient norm", "grad_norm", "c", True),
        ("Seconds per step", "seconds", "a", True),
    ]
    curves = columns(_reward_card(steps, axis), _heldout_card(summary["evaluations"]))
    return section("Learning", lead, stack(curves, columns(*[_small_card(steps, axis, *chart) for chart in small])))


def _reward_card(steps: Sequence[StepRecord], axis: str) -> str:
    points = charts.finite([(getattr(step, axis), step.reward_mean) for step in steps])
    if not points:
        return card("Reward", nothing("No policy step was recorded."))
    window = max(1, min(50, len(points) // 20))
    each = Series(label=f"reward, {axis}", points=points, tone="faint" if window > 1 else "a")
    mean = Series(label=f"mean of {window}", points=charts.moving_mean(points, window), hover=False)
    # The mean is drawn first, because marks that react to the pointer must be on top.
    lines = [mean, each] if window > 1 else [each]
    chart = charts.line_chart(lines, name="Reward by step", x_label=axis, y_label="mean reward")
    keys = [("faint", "each step"), ("a", f"mean of {window} steps")] if window > 1 else [("a", "each step")]
    return card("Reward", chart + charts.legend(keys))


def _heldout_card(evaluations: list[Row]) -> str:
    if not evaluations:
        return card("Held-out accuracy", nothing("This run was not evaluated on held-out prompts."))
    lines = [Series(label="pass@1, version", points=_by_version(evaluations, "pass_1"), tone="b", dots=True)]
    keys = [("b", "pass@1")]
    k = max(e["samples"] for e in evaluations)
    if k > 1:
        lines.append(Series(label=f"pass@{k}, version", points=_by_version(evaluations, "pass_k"), tone="c", dots=True))
        keys.append(("c", f"pass@{k}"))
    chart = charts.line_chart(
        lines, name="Held-out accuracy", x_label="version", y_label="accuracy", y_range=(0.0, 1.02)
    )
    prompts = sorted({e["prompts"] for e in evaluations})
    keys[0] = (keys[0][0], f"pass@1 on {' or '.join(f'{n:,}' for n in prompts)} prompts")
    return card("Held-out accuracy", chart + charts.legend(keys))


def _by_version(evaluations: list[Row], column: str) -> list[tuple[float, float]]:
    return sorted(charts.finite([(e["version"], e[column]) for e in evaluations]))


def _small_card(steps: Sequence[StepRecord], axis: str, title: str, column: str, tone: str, from_zero: bool) -> str:
    points = charts.finite([(getattr(step, axis), getattr(step, column)) for step in steps])
    if not points:
        return card(title, nothing("Not recorded."))
    line = Series(label=f"{title.lower()}, {axis}", points=points, tone=tone)
    return card(title, charts.line_chart([line], name=title, x_label=axis, width=400, height=210, from_zero=from_zero))


def lag(tokens: Mapping[int, int], summary: dict[str, Any]) -> str:
    """Draw the section on the age of trained tokens. `tokens`: lag -> the number of tokens with this lag."""
    total = sum(tokens.values())
    lead = "How many versions older than the one in training each trained token was. None may be over the bound."
    if not total:
        return section("Lag", lead, card("Trained tokens by lag", nothing("Nothing was trained.")))
    shares = {lag: count / total for lag, count in tokens.items()}
    tips = {lag: f"lag {lag}: {count:,} tokens ({charts.percent_label(shares[lag])})" for lag, count in tokens.items()}
    bound = summary["lag_bound"]
    chart = charts.bar_chart(
        shares,
        tips,
        name="Trained tokens by lag",
        x_label="lag in versions",
        bound=None if bound is None else int(bound),
    )
    over = sum(count for lag, count in tokens.items() if bound is not None and lag > bound)
    facts = table(
        [],
        [
            ["tokens trained", f"{total:,}"],
            ["tokens at lag 0", f"{tokens.get(0, 0):,}"],
            ["tokens over the bound", "no bound recorded" if bound is None else f"{over:,}"],
            ["mean lag", number(summary["lag_mean"], 3)],
            ["largest lag", whole(summary["lag_max"])],
        ],
    )
    return section("Lag", lead, columns(card("Trained tokens by lag", chart), card("In numbers", facts)))
