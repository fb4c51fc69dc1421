"""The picture of a run that its display shows: a snapshot that events change, handed over at each tick."""

from __future__ import annotations

from collections import Counter

from headrace.buffer.window import Window
from headrace.observe.activity import Interval
from headrace.observe.progress import Progress
from headrace.observe.snapshot import ProcessActivity, RunSnapshot
from headrace.types import Batch

REWARD_MEMORY = 0.9
"""Of the moving mean that the display shows."""
BUSY_MEMORY = 0.7
"""Likewise, of how busy a process is."""


class Picture:
    """What people see of one run."""

    def __init__(self, progress: Progress, window: Window, versions_total: int) -> None:
        self._progress = progress
        self._window = window
        self._lags: Counter[int] = Counter()
        self._shown = RunSnapshot(versions_total=versions_total, lag_bound=window.lag_bound, capacity=window.capacity)

    @property
    def phase(self) -> str:
        """What the run as a whole is doing."""
        return self._shown.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._shown.phase = phase

    def stepped(self, batch: Batch, lags: Counter[int], reward: float | None) -> None:
        """An optimizer step is done."""
        shown = self._shown
        shown.step = batch.step
        if batch.objective == "imitation":
            shown.message = f"{-batch.step} supervised steps left" if batch.step else ""
            return
        self._lags += lags
        shown.lag_histogram = dict(self._lags)
        shown.trained_tokens += batch.trained_tokens
        if reward is not None:
            before = shown.reward_mean
            shown.reward = reward
            shown.reward_mean = reward if before is None else REWARD_MEMORY * before + (1 - REWARD_MEMORY) * reward

    def proved(self, versions: int) -> None:
        """So many versions are done, in all lives of the run."""
        self._shown.version = versions

    def evaluated(self, accuracy: float) -> None:
        """Held-out prompts were answered."""
        self._shown.heldout = accuracy

    def beat(self, process: str, phase: str, interval: Interval) -> None:
        """A process has said what it did."""
        self._shown.generated_tokens += interval.tokens
        before = self._shown.processes.get(process, ProcessActivity())
        busy = BUSY_MEMORY * before.busy_fraction + (1 - BUSY_MEMORY) * interval.busy_fraction
        self._shown.processes[process] = ProcessActivity(phase=phase, busy_fraction=busy)

    def show(self) -> None:
        """Refresh the display."""
        self._shown.in_flight = self._window.in_flight
        self._shown.ready = self._window.ready
        self._progress.update(self._shown)

    def note(self, line: str) -> None:
        """A line for the people who watch."""
        self._progress.note(line)

    def close(self) -> None:
        """The run has ended."""
        self._progress.stop()
