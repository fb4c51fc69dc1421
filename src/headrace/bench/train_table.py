"""Formats the figures of the training benchmark as lines of text."""

from __future__ import annotations

from typing import Any


def table(found: dict[str, Any]) -> list[str]:
    """Return one aligned line for each figure."""
    rows = [
        ("model", f"{found['model']}, {found['compute_dtype']}, compiled: {'yes' if found['compiled'] else 'no'}"),
        ("device", f"{found['device']} ({found['device_name']}), torch {found['torch']}"),
        ("start", f"loading {found['load_seconds']:.1f} s, warm-up {found['warm_up_seconds']:.1f} s"),
        (
            "a step",
            f"{found['tokens']:,} tokens in {found['sequences']:,} sequences, {found['computed_tokens']:,} computed in "
            f"{found['micro_batches']} passes",
        ),
        ("tokens/s", f"{found['tokens_per_second']:,.0f}"),
        ("step s", f"{found['step_seconds']:.3f} (best {found['best_step_seconds']:.3f})"),
        ("operations a step", f"{found['flops_a_step']:.3e} ({_coefficients(found['flops'])})"),
        *_formula_lines(found["flop_formula"]),
        ("operations a second", f"{found['flops_per_second']:.3e}{_share(found)}"),
        ("peak memory", _memory(found)),
    ]
    for name, variant in found.get("variants", {}).items():
        rows.append((name, _variant(variant)))
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:<{width}}{text}" for name, text in rows]


def _formula_lines(formula: str) -> list[tuple[str, str]]:
    """Return a line for the sum, and a line for each of its terms."""
    total, *terms = formula.split("; ")
    return [("their formula", total), *(("", term) for term in terms)]


def _coefficients(flops: dict[str, int]) -> str:
    return f"{flops['a_token']:.3g} a token, {flops['a_pair']:.3g} a pair, {flops['a_target']:.3g} a target"


def _share(found: dict[str, Any]) -> str:
    if found["mfu"] is None:
        return ""
    return f", MFU {100 * found['mfu']:.1f}% of {found['peak_flops_per_second'] / 1e12:.0f}e12"


def _memory(found: dict[str, Any]) -> str:
    return "not measured" if found["peak_memory_bytes"] is None else f"{found['peak_memory_bytes'] / 2**30:.1f} GiB"


def _variant(found: dict[str, Any]) -> str:
    if not found["ran"]:
        return f"did not run: {found['why']}"
    return f"{found['tokens_per_second']:,.0f} tokens/s, {found['slower']:.2f}x slower, {_memory(found)}"
