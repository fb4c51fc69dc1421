"""A run's summary and its two ledgers, group attempts and rollouts, in words; and the formats of their numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

STATES = ("trained", "dropped", "failed", "in_flight")
"""The states of the ledger. Everything that was admitted is in exactly one of them."""


def describe(summary: dict[str, Any]) -> str:
    """Describe a summary for people, in a few aligned lines."""
    most, bound = whole(summary["lag_max"]), whole(summary["lag_bound"])
    lines = [
        ("run", f"{summary['name'] or 'unnamed'} ({summary['outcome'] or 'no end recorded'})"),
        ("held-out", _change(summary["heldout_before"], summary["heldout_after"], "not evaluated")),
        *_heldout_parts(summary.get("evaluations", []), "tasks"),
        *_heldout_parts(summary.get("evaluations", []), "sets"),
        ("reward", _change(summary["reward_first"], summary["reward_last"], "no step was trained")),
        ("training", _training_line(summary)),
        ("tokens", f"{compact(summary['tokens_generated'])} generated, {compact(summary['tokens_trained'])} trained"),
        (
            "idle",
            f"trainer {percent(summary['trainer_idle_fraction'])}, engine {percent(summary['engine_idle_fraction'])}",
        ),
        ("lag", f"mean {number(summary['lag_mean'], 2)}, max {most}, bound {bound}"),
        ("groups", ledger_line(summary["ledger"])),
        ("rollouts", ledger_line(summary["ledger_rollouts"])),
        ("deliveries", f"{summary['deliveries_proved']} proved, {summary['deliveries_rejected']} rejected"),
        *(("advice", f"(step {told['step']}) {told['line']}") for told in summary.get("advice", [])),
    ]
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def passes_in_words(figures: Mapping[str, float]) -> list[str]:
    """Return pass@k and majority@k among the figures of an evaluation, in words, such as `pass@4 0.750`."""
    found = [(*key.partition("_at_"), value) for key, value in figures.items()]
    return [f"{what}@{k} {number(value)}" for what, at, k, value in found if at]


def _heldout_parts(evaluations: Sequence[Mapping[str, Any]], parts: str) -> list[tuple[str, str]]:
    """Return a line for each of several tasks or sets: the held-out accuracy before and after training."""
    found = [(e["moment"], e[parts]) for e in evaluations if parts in e]
    before: Mapping[str, Any] = next((tasks for moment, tasks in found if moment == "before"), {})
    after: Mapping[str, Any] = next((tasks for moment, tasks in reversed(found) if moment == "after"), {})

    def right(tasks: Mapping[str, Any], name: str) -> float | None:
        return tasks[name]["pass_1"] if name in tasks else None

    names = {**before, **after}
    return [(f"  {name}", _change(right(before, name), right(after, name), "not evaluated")) for name in names]


def lag_mean_and_max(tokens: Mapping[int, int]) -> tuple[float | None, int | None]:
    """Return the mean and the largest lag over tokens, so that an answer weighs as much as in the loss."""
    counted = {lag: count for lag, count in tokens.items() if count}
    if not counted:
        return None, None
    return sum(lag * count for lag, count in counted.items()) / sum(counted.values()), max(counted)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals, or `none`."""
    return "none" if value is None else f"{value:.{digits}f}"


def whole(value: float | None) -> str:
    """Format an integer, or `none`."""
    return "none" if value is None else f"{value:.0f}"


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage, or `unknown`."""
    return "unknown" if fraction is None else f"{100 * fraction:.1f}%"


def thousands(count: int) -> str:
    """Format a count with its thousands apart."""
    return f"{count:,}"


def duration(seconds: float) -> str:
    """Format seconds for people: `8.4 s`, `4:07`, `2:10:45`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def compact(number: float) -> str:
    """Format a count or a rate for people, with about three digits: `950`, `1.2k`, `31k`, `4.6M`."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        # 999.6 would round to 1000, so it gets the next suffix.
        if abs(number) < limit * 0.9995:
            scaled = number / divisor
            digits = 1 if suffix and abs(scaled) < 10 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.2e}"


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table as text, with the cells of each column below each other."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _change(before: float | None, after: float | None, missing: str) -> str:
    return missing if before is None and after is None else f"{number(before)} -> {number(after)}"


def _training_line(summary: dict[str, Any]) -> str:
    text = f"{summary['versions']} versions, {summary['steps']} steps"
    if summary["train_seconds"] is None:
        return text
    text += f" in {duration(summary['train_seconds'])}"
    rate = summary["tokens_per_second"]
    return text if rate is None else f"{text}, {compact(rate)} trained tokens/s"


def ledger_line(ledger: dict[str, Any]) -> str:
    """Return one ledger as an equation."""
    parts = " + ".join(f"{ledger[state]:,} {state.replace('_', ' ')}" for state in STATES)
    sign = "=" if ledger["admitted"] == sum(ledger[state] for state in STATES) else "≠"
    return f"{ledger['admitted']:,} admitted {sign} {parts}"


def describe_ledgers(ledgers: dict[str, Any]) -> str:
    """Describe both ledgers for people: an equation each, the reasons below it, and the verdict."""
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
