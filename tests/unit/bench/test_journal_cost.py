"""The journal's benchmarks: the statistics against known tables, a small journal against what was written into it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from headrace.bench.journal import (
    GROUP_SIZE,
    GROUPS,
    LEFT_GROUPS,
    STEPS_AFTER_CHECKPOINT,
    Block,
    BlockJournal,
    bench_size,
    interval,
    plan_blocks,
)
from headrace.buffer.reader import open_readonly
from headrace.observe.records import StepRecord
from headrace.types import Group, Prompt


def test_the_interval_by_hand() -> None:
    # Losses 0.02, 0.04, 0.06: mean 0.04, deviation 0.02, t with two degrees 4.3027.
    found = interval([100.0, 200.0, 50.0], [98.0, 192.0, 47.0])
    half = 4.3027 * 0.02 / math.sqrt(3)
    assert found["loss_mean"] == pytest.approx(0.04)
    assert found["loss_high"] == pytest.approx(0.04 + half, abs=1e-5)
    assert found["loss_low"] == pytest.approx(0.04 - half, abs=1e-5)
    assert not found["within_limit"], "the mean is below 5%, but the upper end is not"
    assert interval([100.0, 200.0], [99.0, 198.0])["within_limit"]


def test_more_pairs_than_the_table_has_widen_the_interval_a_little() -> None:
    losses = [0.0, 0.1] * 20
    found = interval([1.0] * 40, [1.0 - loss for loss in losses])
    half = found["loss_high"] - found["loss_mean"]
    exact = 2.0227 * statistics.stdev(losses) / math.sqrt(40)  # t with 39 degrees
    assert exact < half < 1.04 * exact


def test_pairs_take_turns_and_blocks_do_not_touch() -> None:
    blocks = plan_blocks(2, 3)
    assert [block.on for block in blocks] == [False, True, True, False]
    assert [(block.first, block.last) for block in blocks] == [(6, 9), (11, 14), (16, 19), (21, 24)]


def test_what_is_held_is_written_after_its_block_in_order(tmp_path: Path) -> None:
    def groups() -> list[int]:
        with open_readonly(tmp_path / "journal.db") as reader:
            return [row["id"] for row in reader.rows("SELECT id FROM groups ORDER BY rowid")]

    def end(step: int) -> None:
        journal.admitted(Group(id=step, prompt=Prompt(id="p"), version=0), [f"{step}/0"])
        journal.step(
            StepRecord(step=step, version=0, objective="policy", groups=0, rollouts=0, tokens=0, trained_tokens=7), {}
        )
        journal.flush()

    with BlockJournal(tmp_path / "journal.db", [Block(False, 1, 3), Block(True, 3, 4)]) as journal:
        end(1)
        assert groups() == [1]
        end(2)
        assert groups() == [1], "off: nothing is written"
        end(3)
        assert groups() == [1, 2, 3], "the block is over"
        end(4)
        rates = journal.rates()
        assert [len(rates[kind]) for kind in ("off", "on")] == [1, 1] and min(rates["off"] + rates["on"]) > 0
    with open_readonly(tmp_path / "journal.db") as reader:
        assert reader.counts()["groups"]["admitted"] == 4


def test_a_small_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    steps = 12
    found = bench_size(tmp_path, steps * GROUPS * GROUP_SIZE, lambda line: None)
    assert (found["steps"], found["steps_again"]) == (steps, STEPS_AFTER_CHECKPOINT)
    assert found["groups_left"] == LEFT_GROUPS
    assert found["counted"] == (steps * GROUPS + LEFT_GROUPS) * GROUP_SIZE and found["balanced"]
    ended = steps * GROUPS + LEFT_GROUPS // 2
    right_and_mixed = sum(
        (group + index) % 10 == 0 and index % 2 == 1 for group in range(ended) for index in range(GROUP_SIZE)
    )
    assert found["matched"] == right_and_mixed > found["shown"] == 20
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert found["seconds"]["resume"] > found["seconds"]["open"] + found["seconds"]["recover"]
