"""Measures what the journal costs a run: in one real run, the journal is switched off for some versions.

Versions are divided into blocks, and the blocks into pairs: the journal is off in one block of a pair and on in the
other. Off means that events stay in memory: no row, no token and no partial answer is written. They are written after
the block, in versions that are not counted. So the journal of the run is complete at the end, and its ledgers balance.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.bench.workload import loop_config, write_model
from headrace.buffer.journal import Journal
from headrace.buffer.store import Store
from headrace.buffer.writer import Call, Event, Writer
from headrace.observe.progress import NoProgress
from headrace.pipeline.inputs import check_inputs
from headrace.pipeline.session import RunSession
from headrace.review.summary import read_ledgers
from headrace.run_dir import RunDir

WARM_VERSIONS = 4
"""The number of first versions that are not counted."""
SETTLE_VERSIONS = 2
"""The number of versions before every block that are not counted. In these versions, events that were kept in memory or
are still queued are written."""
DEPTH = 2
PROMPT, ANSWER = 16, 32
CONFIDENCE = 0.95
LIMIT = 0.05
"""The largest share of the rate that the journal may cost, at the upper end of the confidence interval."""


class Block(NamedTuple):
    """The optimizer steps first < step <= last, with the journal on or off."""

    on: bool
    first: int
    last: int


def plan_blocks(pairs: int, versions: int) -> list[Block]:
    """Return pairs of blocks of `versions` versions each.

    The order of on and off changes from pair to pair, so that a slow drift of the machine's speed cancels out.
    """
    blocks, step = [], WARM_VERSIONS
    for pair in range(pairs):
        for on in (False, True) if pair % 2 == 0 else (True, False):
            step += SETTLE_VERSIONS
            blocks.append(Block(on, step, step + versions))
            step += versions
    return blocks


class HoldingWriter(Writer):
    """A writer that keeps events in memory between `hold` and `let_go`.

    A `Call`, whose result somebody waits for, is never kept.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._held: list[Event] | None = None

    def hold(self) -> None:
        """Keep all later events in memory."""
        self._held = [] if self._held is None else self._held

    def let_go(self) -> None:
        """Write the kept events in order, and keep no new ones. Call this in the thread that calls `put`."""
        held, self._held = self._held or [], None
        for event in held:
            super().put(event)

    def put(self, event: Event) -> None:
        """Queue an event, or keep it in memory."""
        if self._held is None or isinstance(event, Call):
            super().put(event)
        else:
            self._held.append(event)

    def close(self, timeout: float) -> None:
        """Write all events, and close the writer."""
        self.let_go()
        super().close(timeout)


class BlockJournal(Journal):
    """A journal that is off in some blocks, and records when each step ended."""

    def __init__(self, path: Path, blocks: Sequence[Block], *, keep_rollouts: bool = True) -> None:
        self.path = path
        self._clock = time.time
        self._writer: HoldingWriter = HoldingWriter(Store(path, keep_rollouts=keep_rollouts, lock_seconds=10.0))
        self._blocks = blocks
        self._ended: dict[int, tuple[float, int]] = {}

    def step(self, *, step: int, trained_tokens: int, **facts: Any) -> None:
        """Record an optimizer step. If a block begins or ends with this step, switch the journal."""
        super().step(step=step, trained_tokens=trained_tokens, **facts)
        self._ended[step] = (time.monotonic(), trained_tokens)
        for block in self._blocks:
            if step == block.first and not block.on:
                self._writer.hold()
            if step == block.last:
                self._writer.let_go()

    def rates(self) -> dict[str, list[float]]:
        """Return the consumed tokens per second of each block, in order, by `off` and `on`."""
        found: dict[str, list[float]] = {"off": [], "on": []}
        for block in self._blocks:
            tokens = sum(self._ended[step][1] for step in range(block.first + 1, block.last + 1))
            seconds = self._ended[block.last][0] - self._ended[block.first][0]
            found["on" if block.on else "off"].append(tokens / seconds)
        return found


def bench_overhead(pairs: int, versions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Make one run with this many pairs of blocks, of `versions` versions each, and return the figures."""
    blocks = plan_blocks(pairs, versions)
    total = blocks[-1].last + DEPTH + 1  # The last versions are not measured: nothing is generated beside them.
    made: list[BlockJournal] = []

    def journal(path: Path, *, keep_rollouts: bool) -> Journal:
        made.append(BlockJournal(path, blocks, keep_rollouts=keep_rollouts))
        return made[-1]

    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        write_model(directory / "model")
        config = loop_config(
            directory, "run", prompt=PROMPT, answer=ANSWER, versions=total, depth=DEPTH, threads=1, keep_rollouts=True
        )
        say(f"{total} versions in {2 * pairs} blocks of {versions}")
        run_dir = RunDir.create(config)
        task, chat = check_inputs(config)
        RunSession(config, run_dir, NoProgress(), task, chat, journal=journal).execute()
        balanced = read_ledgers(run_dir.path)["balanced"]
    rates = made[0].rates()
    for pair, (off, on) in enumerate(zip(rates["off"], rates["on"], strict=True), start=1):
        say(f"pair {pair}: {off:.0f} tokens/s without, {on:.0f} with, loss {1 - on / off:+.1%}")
    measured = interval(rates["off"], rates["on"])
    return {"pairs": pairs, "versions": versions, **rates, **measured, "limit": LIMIT, "balanced": balanced}


def interval(off: Sequence[float], on: Sequence[float]) -> dict[str, float]:
    """Return the mean relative loss of the pairs, and the ends of its confidence interval by Student's t."""
    losses = [1 - with_it / without for without, with_it in zip(off, on, strict=True)]
    mean = statistics.fmean(losses)
    half = student_t(CONFIDENCE, len(losses) - 1) * statistics.stdev(losses) / math.sqrt(len(losses))
    return {"loss_mean": mean, "loss_low": mean - half, "loss_high": mean + half}


def student_t(confidence: float, freedom: int) -> float:
    """Return the t for which a value lies between -t and t with this probability.

    It is found by numerical integration and bisection.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def inside(t: float) -> float:
        # Integrated over the angle a with x = sqrt(n) tan(a), so that heavy tails need no more points than light ones.
        angles = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 4001)
        return float(2 * scale * math.sqrt(freedom) * np.trapezoid(np.cos(angles) ** (freedom - 1), angles))

    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return (low + high) / 2


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    off, on = statistics.fmean(found["off"]), statistics.fmean(found["on"])
    verdict = "within" if found["loss_high"] <= found["limit"] else "NOT within"
    return [
        f"{found['pairs']} pairs of blocks of {found['versions']} versions: {off:.0f} tokens/s without, {on:.0f} with",
        f"loss {found['loss_mean']:+.2%}, 95% interval {found['loss_low']:+.2%} to {found['loss_high']:+.2%}: "
        f"{verdict} {found['limit']:.0%}",
    ]
