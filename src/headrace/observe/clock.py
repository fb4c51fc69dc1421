"""The two clocks of a run: spans use monotonic time, the journal uses wall time.

Only this module converts between them.

The pair is read once, at the start of the controller, so a change of the wall clock never distorts a timeline.
"""

from __future__ import annotations

import time

import msgspec


class RunClock(msgspec.Struct, frozen=True):
    """One moment on both clocks."""

    wall: float
    """The wall time in seconds since 1970."""
    monotonic: float
    """The monotonic time, in seconds of `time.monotonic`."""

    @classmethod
    def now(cls) -> RunClock:
        """Return the clock of a run that starts now."""
        return cls(wall=time.time(), monotonic=time.monotonic())

    def to_wall(self, monotonic: float) -> float:
        """Return the wall time of a monotonic moment."""
        return self.wall + (monotonic - self.monotonic)

    def to_monotonic(self, wall: float) -> float:
        """Return the monotonic moment of a wall time."""
        return self.monotonic + (wall - self.wall)


def duration(seconds: float) -> str:
    """Format seconds for people: `8.4 s`, `4:07`, `2:10:45`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def compact(number: float) -> str:
    """Format a count or a rate for people, with about three digits: `950`, `1.2k`, `31k`, `4.6M`."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        # 999.6 would round to 1000, so it gets the next suffix.
        if abs(number) < limit * 0.9995:
            scaled = number / divisor
            digits = 1 if suffix and abs(scaled) < 10 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.2e}"
