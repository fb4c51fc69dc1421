"""Formats the figures of the loop benchmark of one model as lines of text."""

from __future__ import annotations

from typing import Any


def table(found: dict[str, Any]) -> list[str]:
    """Return one aligned line for each figure."""
    options = found["arguments"]
    rows = [
        ("model", f"{found['model']}, {found['device_name']}, torch {found['torch']}"),
        ("work", f"{options['in_flight']} answers in flight and a version, lengths {options['lengths']}"),
        ("synchronous", _run(found["synchronous"])),
        (f"asynchronous, depth {options['depth']}", _run(found["asynchronous"])),
        ("asynchronous over synchronous", f"{found['ratio']:.2f}x"),
        ("generation alone", f"{found['generation_alone']:,.0f} tokens/s"),
        ("training alone", f"{found['training_alone']:,.0f} tokens/s ({found['training_alone_from']} run's steps)"),
        ("one after the other", f"{found['bound_without_overlap']:,.0f} tokens/s at best"),
        ("of that", f"{found['of_the_bound']:.2f}"),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return [f"{name:<{width}}{text}" for name, text in rows]


def _run(run: dict[str, Any]) -> str:
    parts = [
        f"{run['tokens_per_second']:,.0f} tokens/s",
        f"training {run['training_seconds'] / run['seconds']:.2f} of the time",
        f"idle: trainer {_share(run['trainer_idle_fraction'])}, engine {_share(run['engine_idle_fraction'])}",
        f"lag {run['lag_mean']:.2f} (max {run['lag_max']})",
    ]
    return "   ".join(parts + _memory(run))


def _memory(run: dict[str, Any]) -> list[str]:
    """Return the peak memory of the GPU, and the peak of each role's allocator; nothing if there is no GPU."""
    if run["peak_memory_bytes"] is None:
        return []
    sides = ", ".join(f"{role} {_gib(run[f'{role}_peak_memory_bytes'])}" for role in ("trainer", "engine"))
    return [f"memory {_gib(run['peak_memory_bytes'])} GiB: {sides}"]


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f}"


def _share(fraction: float | None) -> str:
    """Format a fraction. It is unknown if a run ended before its processes reported what they did."""
    return "unknown" if fraction is None else f"{fraction:.2f}"
