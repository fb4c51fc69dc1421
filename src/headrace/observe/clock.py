"""One run, two clocks: spans are monotonic, the journal is wall time, and here is the only place that joins them.

The pair is read once, at the start of the controller, so that an adjusted wall clock never bends a timeline.
"""

from __future__ import annotations

import time

import msgspec


class RunClock(msgspec.Struct, frozen=True):
    """The same moment on both clocks."""

    wall: float
    """Seconds since 1970."""
    monotonic: float
    """Seconds of `time.monotonic`."""

    @classmethod
    def now(cls) -> RunClock:
        """The clock of a run that starts now."""
        return cls(wall=time.time(), monotonic=time.monotonic())

    def to_wall(self, monotonic: float) -> float:
        """The wall time of a monotonic moment."""
        return self.wall + (monotonic - self.monotonic)

    def to_monotonic(self, wall: float) -> float:
        """The monotonic moment of a wall time."""
        return self.monotonic + (wall - self.wall)


def duration(seconds: float) -> str:
    """Seconds for people: `8.4 s`, `4:07`, `2:10:45`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def compact(number: float) -> str:
    """A count or a rate for people, in about three digits: `950`, `1.2k`, `31k`, `4.6M`."""
    for limit, divisor, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        # 999.6 rounds to 1000, which the next suffix says better.
        if abs(number) < limit * 0.9995:
            scaled = number / divisor
            digits = 1 if suffix and abs(scaled) < 10 else 0
            return f"{scaled:.{digits}f}{suffix}"
    return f"{number:.2e}"
