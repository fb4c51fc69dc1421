"""Keeps the snapshot of a run that the display shows.

The controller's events change the snapshot. At every tick, `show` hands it to the display.
"""

from __future__ import annotations

from collections import Counter

from headrace.buffer.window import Window
from headrace.observe.progress import ProcessActivity, Progress, RunSnapshot
from headrace.observe.spans import Interval
from headrace.types import Batch

REWARD_MEMORY = 0.9
"""The weight of the past in the moving mean of the reward that the display shows."""
BUSY_MEMORY = 0.7
"""The weight of the past in the moving mean of how busy a process is."""


class RunView:
    """The state of one run as its display shows it. Only `show` and `note` reach the display before `close`."""

    def __init__(self, progress: Progress, window: Window, versions_total: int) -> None:
        self._progress = progress
        self._window = window
        self._lags: Counter[int] = Counter()
        self._shown = RunSnapshot(versions_total=versions_total, lag_bound=window.lag_bound, capacity=window.capacity)

    @property
    def phase(self) -> str:
        """The present phase of the run as a whole."""
        return self._shown.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._shown.phase = phase

    def stepped(self, batch: Batch, lags: Counter[int], reward: float | None) -> None:
        """Note that the optimizer step of this batch is done.

        Supervised steps are numbered up to 0, and change only the step and the message.
        """
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
        """Note how many versions are proved, including those of previous processes of this run."""
        self._shown.version = versions

    def evaluated(self, accuracy: float) -> None:
        """Note the accuracy on held-out prompts."""
        self._shown.heldout = accuracy

    def beat(self, process: str, phase: str, interval: Interval) -> None:
        """Note what a process reported in its heartbeat: its phase, and its work since the heartbeat before."""
        self._shown.generated_tokens += interval.tokens
        before = self._shown.processes.get(process, ProcessActivity())
        busy = BUSY_MEMORY * before.busy_fraction + (1 - BUSY_MEMORY) * interval.busy_fraction
        self._shown.processes[process] = ProcessActivity(phase=phase, busy_fraction=busy)

    def show(self) -> None:
        """Hand the snapshot to the display."""
        self._shown.in_flight = self._window.in_flight
        self._shown.ready = self._window.ready
        self._progress.update(self._shown)

    def note(self, line: str) -> None:
        """Print a line that stays on the display."""
        self._progress.note(line)

    def close(self) -> None:
        """Stop the display: the run has ended."""
        self._progress.stop()
