"""The progress display of a run: a live panel, plain lines, or nothing. It takes almost no CPU time.

All three displays take the same snapshots. The cores of the machine belong to engines and trainers, so a display draws
at most a few times a second, however often it is updated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import Literal, Protocol

from rich.console import Console

from headrace.observe.clock import compact, duration
from headrace.observe.live import LiveProgress
from headrace.observe.snapshot import ProcessActivity, Rates, RunSnapshot

__all__ = [
    "LiveProgress",
    "NoProgress",
    "PlainProgress",
    "ProcessActivity",
    "Progress",
    "RunSnapshot",
    "make_progress",
]


class Progress(Protocol):
    """A display of a run's progress. Every method returns at once, and none raises because of what it displays."""

    def start(self) -> None:
        """Start the display. Called once, before anything else."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Display the current state. May be called at any rate; the caller may reuse the struct afterwards."""

    def note(self, line: str) -> None:
        """Print a line that stays: an evaluation's result, a warning."""

    def stop(self) -> None:
        """Show the last state and release the terminal. Idempotent, and allowed without `start`."""


class NoProgress:
    """A display that shows nothing."""

    def start(self) -> None:
        """Do nothing."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Do nothing."""

    def note(self, line: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class PlainProgress:
    """A display that prints a line every few seconds, and at once when the phase or the held-out accuracy changes."""

    def __init__(self, console: Console, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._every = every
        self._clock = clock
        self._rates = Rates()
        self._last: RunSnapshot | None = None
        self._printed: tuple[float, str] | None = None

    def start(self) -> None:
        """Do nothing, because there is nothing to set up."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Print a line if enough time has passed, or if something has changed."""
        now = self._clock()
        self._rates.add(now, snapshot)
        # A copy, because the controller fills the same struct again and again.
        last, self._last = self._last, copy(snapshot)
        happened = last is None or last.phase != snapshot.phase or last.heldout != snapshot.heldout
        if happened or self._printed is None or now - self._printed[0] >= self._every:
            self._print(now, plain_line(snapshot, self._rates))

    def note(self, line: str) -> None:
        """Print a line."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Print the last state, unless it is already the last line."""
        if self._last is not None:
            self._print(self._clock(), plain_line(self._last, self._rates))
            self._last = None

    def _print(self, now: float, line: str) -> None:
        if self._printed is None or self._printed[1] != line:
            self.note(line)
        self._printed = (now, line)


def plain_line(snapshot: RunSnapshot, rates: Rates) -> str:
    """Describe a snapshot in one line. What is not known yet is left out."""
    parts = [] if snapshot.phase == "training" else [snapshot.phase]
    if snapshot.versions_total:
        parts.append(f"version {snapshot.version}/{snapshot.versions_total}")
    if snapshot.reward_mean is not None or snapshot.reward is not None:
        reward = snapshot.reward_mean if snapshot.reward_mean is not None else snapshot.reward
        parts.append(f"reward {reward:.3f}")
    if snapshot.heldout is not None:
        parts.append(f"held-out {snapshot.heldout:.3f}")
    if rates.generated:
        parts.append(f"gen {compact(rates.generated)} tok/s")
    if rates.trained:
        parts.append(f"trained {compact(rates.trained)} tok/s")
    if snapshot.lag_mean is not None:
        bound = "" if snapshot.lag_bound is None else f" (bound {snapshot.lag_bound})"
        parts.append(f"lag mean {snapshot.lag_mean:.2f} max {snapshot.lag_max}{bound}")
    idle = {role: snapshot.idle(role) for role in ("trainer", "engine")}
    known = [f"{role} {100 * fraction:.0f}%" for role, fraction in idle.items() if fraction is not None]
    if known:
        parts.append("idle " + " ".join(known))
    if snapshot.phase == "training" and rates.seconds_left is not None:
        parts.append(f"{duration(rates.seconds_left)} left")
    if snapshot.message:
        parts.append(snapshot.message)
    return " · ".join(parts)


def make_progress(
    kind: Literal["auto", "live", "plain", "none"] = "auto", console: Console | None = None, *, title: str = "headrace"
) -> Progress:
    """Make the display that `[observe] display` asks for. `auto` is live on a terminal and plain lines elsewhere."""
    console = console or Console()
    drawable = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    if kind == "none":
        return NoProgress()
    if kind == "plain" or (kind == "auto" and not drawable):
        return PlainProgress(console)
    if not drawable:
        plain = PlainProgress(console)
        plain.note('[observe] display = "live" needs a terminal; showing plain lines instead')
        return plain
    return LiveProgress(console, title=title)
