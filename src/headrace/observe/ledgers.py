"""The two ledgers of a run, group attempts and rollouts, in words."""

from __future__ import annotations

from typing import Any

STATES = ("trained", "dropped", "failed", "in_flight")
"""The states of the ledger. Everything that was admitted is in exactly one of them."""


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
