"""The figures of the loop benchmark: what training alone is, and who has held how much of the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.loop import BALANCE, LONGEST_PROMPT, SHORTEST_PROMPT, faster_training, held_by, next_prompt
from headrace.bench.workload import steady_rate


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


def test_the_next_prompt_balances_training_and_generation() -> None:
    """Generation takes 4 s and 1 s per 100 tokens, training 3 s per 100 tokens: both times are linear in the length."""
    points = [(length, 4 + length / 100, 3 * length / 100) for length in (100, 300)]
    wanted = 400 * BALANCE / (3 - BALANCE)
    assert next_prompt(points) == round(wanted)
    assert next_prompt(points[:1]) > 100, "training is the shorter side"
    assert next_prompt([(96, 1.0, 1000.0)]) == SHORTEST_PROMPT and next_prompt([(96, 1000.0, 1.0)]) == LONGEST_PROMPT
