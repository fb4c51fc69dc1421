"""The benchmarks that are whole runs, cut down: what they measure is really there."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench import journal, loop
from headrace.bench.options import LoopBench, lines
from headrace.bench.workload import LengthsTask
from headrace.errors import UserError


@pytest.mark.slow
def test_a_run_whose_journal_was_off_now_and_then_is_whole(tmp_path: Path) -> None:
    said: list[str] = []
    found = journal.bench_overhead(tmp_path, 2, 1, said.append)
    assert found["balanced"], "what was held in memory is in the journal, in its order"
    assert len(found["off"]) == len(found["on"]) == 2 and min(found["off"] + found["on"]) > 0
    losses = [1 - on / off for off, on in zip(found["off"], found["on"], strict=True)]
    assert found["loss_mean"] == pytest.approx(sum(losses) / 2)
    assert found["loss_low"] <= found["loss_mean"] <= found["loss_high"]
    assert len(said) == 3


@pytest.mark.slow
def test_both_depths_consume_the_same_answers() -> None:
    options = LoopBench(long_tail=True, versions=loop.LEAST_TAIL_VERSIONS, rounds=1)
    found = loop.bench_loop(options, lambda line: None)
    assert all(len(line) < 200 for line in lines(found))
    (synchronous,), (asynchronous,) = found["runs"].values()
    assert (synchronous["lag_max"], synchronous["lag_mean"]) == (0, 0.0)
    assert asynchronous["lag_max"] <= 5, "the bound of depth 2"
    assert found["ratio"] == pytest.approx(asynchronous["tokens_per_second"] / synchronous["tokens_per_second"])
    assert found["ratios"] == [pytest.approx(found["ratio"])]


def test_the_lengths_are_those_of_the_study() -> None:
    """Lognormal around the median, but for a tenth that is ten times longer, cut where the model's room ends."""
    task = LengthsTask(8, f"long-tail:{loop.TAIL_LONGEST}", 0, 0)
    lengths = sorted(task.episode(task.train[0]).max_tokens for _ in range(20_000))
    assert lengths[0] >= 1 and lengths[-1] == loop.TAIL_LONGEST
    assert 4 <= lengths[len(lengths) // 2] <= 5
    # 0.9 x P(4 e^(0.8 z) > 30.5) + 0.1 x P(40 e^(0.8 z) > 30.5), z normal: 0.9 x 0.0055 + 0.1 x 0.633.
    assert sum(length > 30 for length in lengths) / len(lengths) == pytest.approx(0.0683, abs=0.008)


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UserError, match="--versions 3: at least 5 with --long-tail"):
        loop.bench_loop(LoopBench(long_tail=True, versions=3), lambda line: None)
    with pytest.raises(UserError, match="--long-tail: measures a tiny model of its own"):
        LoopBench(long_tail=True, model="qwen3-0.6b").check()
