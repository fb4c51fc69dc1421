"""The figures of the loop benchmark: what training alone is, and who has held how much of the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.shared_table import table
from headrace.bench.shared_work import faster_training, held_by, steady_rate


def _rate_of(seconds: float) -> dict[str, Any]:
    steps = [{"ended": 10.0 * i, "trained_tokens": 1000, "seconds": seconds} for i in range(4)]
    return steady_rate(steps, 0, 2)


def test_training_alone_is_that_of_the_faster_steps() -> None:
    slow, fast = _rate_of(6.1), _rate_of(5.1)
    assert fast["training_tokens_per_second"] == pytest.approx(2000 / 10.2)
    for runs in ({"synchronous": slow, "asynchronous": fast}, {"asynchronous": fast, "synchronous": slow}):
        assert faster_training(runs) == ("asynchronous", pytest.approx(2000 / 10.2))
    assert faster_training({"synchronous": fast, "asynchronous": slow})[0] == "synchronous"


def test_each_side_has_the_peaks_of_its_processes() -> None:
    peaks = {"trainer-0": 5, "engine-0": 2, "engine-1": 3}
    assert [held_by(role, peaks) for role in ("trainer", "engine")] == [5, 5]
    assert held_by("engine", {}) is None, "on a CPU nobody says anything"


def test_the_table_shows_both_sides_memory_and_whose_steps_count() -> None:
    idle = {"trainer_idle_fraction": 0.5, "engine_idle_fraction": None, "lag_mean": 1.0, "lag_max": 2}
    memory = {"peak_memory_bytes": 60 << 30, "trainer_peak_memory_bytes": 33 << 30, "engine_peak_memory_bytes": None}
    found = {
        "model": "m",
        "device_name": "GPU",
        "torch": "2",
        "arguments": {"in_flight": 4, "lengths": "equal:4", "depth": 2},
        "synchronous": _rate_of(6.1) | idle | memory,
        "asynchronous": _rate_of(5.1) | idle | memory | {"engine_peak_memory_bytes": 25 << 30},
        "ratio": 1.0,
        "generation_alone": 300.0,
        "training_alone": 196.0,
        "training_alone_from": "asynchronous",
        "bound_without_overlap": 118.0,
        "of_the_bound": 0.9,
    }
    lines = table(found)
    assert lines[2].endswith("memory 60.0 GiB: trainer 33.0, engine unknown")
    assert lines[3].endswith("memory 60.0 GiB: trainer 33.0, engine 25.0")
    assert lines[6].endswith("196 tokens/s (asynchronous run's steps)")
