"""Formats the figures of the engine benchmark as lines of text."""

from __future__ import annotations

from typing import Any


def table(found: dict[str, Any]) -> list[str]:
    """Return one aligned line for each figure, in sections."""
    rows = [*_speed(found), *_ceiling(found)]
    sections = {"rescore": _rescore, "before_tail": _before_tail, "tail": _tail, "fork": _fork, "swaps": _swaps}
    for name, section in sections.items():
        if found[name]:
            rows += section(found[name])
    for name, peer in found["peers"].items():
        rows.append((f"peer {name}", _peer(peer)))
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:<{width}}{text}" for name, text in rows]


def _speed(found: dict[str, Any]) -> list[tuple[str, str]]:
    step = found["step_ms"]
    split = "" if step["host"] is None else f", host {step['host']:.3f}, device {step['device']:.3f}"
    decode = "" if step["decode"] is None else f", decode only {step['decode']:.3f}"
    return [
        ("model", f"{found['model']}, {found['dtype']}, {found['parameter_bytes'] / 1e6:,.1f} MB"),
        ("device", f"{found['device']} ({found['device_name']}), torch {found['torch']}"),
        (
            "start to first token",
            f"{found['start_seconds']:.2f} s (loading {found['load_seconds']:.2f} s, "
            f"warm-up {found['warm_up_seconds']:.2f} s)",
        ),
        ("tokens/s", f"{found['tokens_per_second']:,.0f}"),
        ("", f"{found['generated_tokens']:,} tokens of {found['requests']:,} requests in {found['seconds']:.2f} s"),
        (
            "steps",
            f"{found['steps']:,} ({found['prefilled_tokens']:,} tokens prefilled, {found['preemptions']} preemptions)",
        ),
        ("step ms", f"{step['all']:.3f}{decode}{split}"),
    ]


def _ceiling(found: dict[str, Any]) -> list[tuple[str, str]]:
    size = found["bytes_a_step"]
    return [
        ("MB a step", f"{size['all'] / 1e6:,.1f}: weights {size['weights'] / 1e6:,.1f}, KV {size['kv'] / 1e6:,.1f}"),
        ("bandwidth", f"{found['bandwidth_bytes_a_second'] / 1e9:,.1f} GB/s (a large copy, bytes read and written)"),
        ("ceiling", f"{found['ceiling_tokens_per_second']:,.0f} tokens/s, {found['ceiling_step_ms']:.3f} ms a step"),
        ("fraction of the ceiling", f"{found['fraction_of_ceiling']:.3f}"),
    ]


def _rescore(found: dict[str, Any]) -> list[tuple[str, str]]:
    text = (
        f"mean {found['mean_error']:.2g}, max {found['max_error']:.2g} against float32 ({found['tokens']:,} tokens;"
        f" the plain model's own mean {found['plain_mean_error']:.2g})"
    )
    outside = f"; {found['outside']} at the edge of truncation" if found["outside"] else ""
    return [("log-probability error", text + outside)]


def _before_tail(found: dict[str, Any]) -> list[tuple[str, str]]:
    return _stretch("before the tail", found)


def _tail(found: dict[str, Any]) -> list[tuple[str, str]]:
    return _stretch("tail", found)


def _stretch(name: str, found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            name,
            f"{found['rows']} rows, {found['steps']:,} steps of {found['step_ms']:.3f} ms, "
            f"{1e3 / found['step_ms']:,.0f} steps/s, {found['tokens_per_second']:,.0f} tokens/s",
        ),
        (f"{name}, of the ceiling", f"{found['fraction_of_ceiling']:.3f} of {found['ceiling_step_ms']:.3f} ms a step"),
    ]


def _fork(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (
            "fork",
            f"{found['continuations']} from token {found['at']}: {found['prefilled_tokens']} tokens prefilled "
            f"(fresh runs {found['fresh_prefilled_tokens']})",
        ),
        (
            "fork, equal to fresh",
            f"{found['equal']} of {found['continuations']}, log-probabilities within "
            f"{found['max_logprob_difference']:.2g}",
        ),
    ]


def _swaps(found: dict[str, Any]) -> list[tuple[str, str]]:
    if not found["swaps"]:
        return [("swaps", "none: the run was shorter than --swap-every, or staging was slower than the run")]
    every = f", one every {found['interval_seconds']:.2f} s" if found["interval_seconds"] is not None else ""
    return [
        ("swaps", f"{found['swaps']}{every}; staged beside in {found['stage_seconds_mean']:.3f} s"),
        (
            "stall a swap, ms",
            f"mean {1e3 * found['stall_seconds_mean']:.2f}, max {1e3 * found['stall_seconds_max']:.2f}; "
            f"copy at bandwidth {1e3 * found['copy_seconds']:.2f}, limit {1e3 * found['stall_limit_seconds']:.2f}",
        ),
        (
            "tokens/s with swaps",
            f"{found['tokens_per_second_with']:,.0f}, without "
            f"{found['tokens_per_second_without']:,.0f}: loss {100 * found['loss']:.1f}%",
        ),
        (
            "mis-tagged tokens",
            f"{found['mis_tagged']} ({found['replayed_tokens']:,} replayed, {found['replayed_outside']} cut off; "
            f"max error {found['replay_max_error']:.2g}, by the other weights {found['other_version_mean_error']:.2g})",
        ),
    ]


def _peer(found: dict[str, Any]) -> str:
    if not found["ran"]:
        return f"did not run: {found['why']}"
    return f"{found['tokens_per_second']:,.0f} tokens/s; the engine has {found['ratio']:.2f}x"
