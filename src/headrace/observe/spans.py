"""Spans record what a process did, from when to when. Any thread records them; the code that ships them drains them.

Times are seconds of `time.monotonic`, which all processes of one host share. Neighbouring spans of one name are joined,
so that a thousand decode steps make few spans. A span that is still open when spans are drained is cut there, so that a
long step is never reported late.

The journal uses wall time. A `RunClock` alone converts between the two. It is read once, at the start of the
controller, so a change of the wall clock never distorts a timeline.

`Activity` says how busy each process is and how fast it generates, from heartbeat to heartbeat. Every second is counted
once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec


class TimeSpan(msgspec.Struct, frozen=True, array_like=True):
    """A named piece of time in one process."""

    name: str
    start: float
    end: float
    busy: bool = True
    """False for a wait, a time in which this process had nothing to do."""


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


class SpanRecorder:
    """The recorder of one process's spans. It is thread-safe."""

    JOIN_SECONDS = 0.002
    LONGEST_SECONDS = 1.0

    def __init__(self) -> None:
        self._spans: list[TimeSpan] = []
        self._open: dict[object, TimeSpan] = {}
        """The spans whose end is not known yet. Their start moves when a drain cuts them."""
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, *, busy: bool = True) -> Iterator[None]:
        """Record the time that the body of the `with` statement takes."""
        key = object()
        with self._lock:
            self._open[key] = TimeSpan(name, time.monotonic(), math.inf, busy)
        try:
            yield
        finally:
            with self._lock:
                opened = self._open.pop(key)
                self._append(TimeSpan(name, opened.start, time.monotonic(), busy))

    def add(self, name: str, start: float, end: float, *, busy: bool = True) -> None:
        """Record a span that has ended."""
        with self._lock:
            self._append(TimeSpan(name, start, end, busy))

    def drain(self) -> list[TimeSpan]:
        """Take all spans recorded so far. Open spans are included up to now."""
        with self._lock:
            now = time.monotonic()
            for key, opened in self._open.items():
                self._append(msgspec.structs.replace(opened, end=now))
                self._open[key] = msgspec.structs.replace(opened, start=now)
            spans, self._spans = self._spans, []
        return spans

    def _append(self, span: TimeSpan) -> None:
        last = self._spans[-1] if self._spans else None
        if (
            last is not None
            and (last.name, last.busy) == (span.name, span.busy)
            and 0 <= span.start - last.end < self.JOIN_SECONDS
            and span.end - last.start < self.LONGEST_SECONDS
        ):
            self._spans[-1] = TimeSpan(span.name, last.start, span.end, span.busy)
        else:
            self._spans.append(span)


def busy_seconds(spans: Iterable[TimeSpan], start: float, end: float) -> float:
    """Return the seconds within [start, end] that at least one busy span covers."""
    total, reach = 0.0, start
    for span in sorted((s for s in spans if s.busy), key=lambda s: s.start):
        total += max(0.0, min(span.end, end) - max(span.start, reach))
        reach = max(reach, min(span.end, end))
    return total


class Interval(NamedTuple):
    """What a process did between two heartbeats. Times are monotonic."""

    started: float
    ended: float
    busy: float
    """The busy time in seconds."""
    tokens: int
    """The number of generated tokens."""

    @property
    def busy_fraction(self) -> float:
        """The busy fraction; 0 for the first heartbeat, before which nothing is known."""
        return self.busy / (self.ended - self.started) if self.ended > self.started else 0.0


class Activity:
    """The last heartbeats of all processes."""

    def __init__(self) -> None:
        self._last_beat: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        """Process -> tokens per second at its last heartbeat."""

    def beat(self, process: str, now: float, spans: Iterable[TimeSpan], tokens: int) -> Interval:
        """Return what the process did since its last heartbeat.

        The heartbeat was sent at `now` on the sender's monotonic clock. Its spans and tokens are those since the last
        heartbeat.
        """
        started = self._last_beat.get(process, now)
        self._last_beat[process] = now
        interval = Interval(started, now, busy_seconds(spans, started, now), tokens)
        self._rates[process] = tokens / (now - started) if now > started else 0.0
        return interval

    def died(self, process: str) -> float:
        """Forget a process that has ended, and return its last tokens per second."""
        return self._rates.pop(process, 0.0)
