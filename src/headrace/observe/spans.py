"""Spans record what a process did, from when to when. Any thread records them; the code that ships them drains them.

Times are seconds of `time.monotonic`, which all processes of one host share. Neighbouring spans of one name are joined,
so that a thousand decode steps make few spans. A span that is still open when spans are drained is cut there, so that a
long step is never reported late.

`Activity` says how busy each process is and how fast it generates, from heartbeat to heartbeat. Every second is counted
once.
"""

from __future__ import annotations

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


class _Open:
    """A span whose end is not known yet. `start` moves when a drain cuts the span."""

    __slots__ = ("busy", "name", "start")

    def __init__(self, name: str, busy: bool) -> None:
        self.name = name
        self.busy = busy
        self.start = time.monotonic()


class SpanRecorder:
    """The recorder of one process's spans. It is thread-safe."""

    JOIN_SECONDS = 0.002
    LONGEST_SECONDS = 1.0

    def __init__(self) -> None:
        self._spans: list[TimeSpan] = []
        self._open: list[_Open] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, *, busy: bool = True) -> Iterator[None]:
        """Record the time that the body of the `with` statement takes."""
        with self._lock:
            opened = _Open(name, busy)
            self._open.append(opened)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(opened)
                self._append(TimeSpan(name, opened.start, time.monotonic(), busy))

    def add(self, name: str, start: float, end: float, *, busy: bool = True) -> None:
        """Record a span that has ended."""
        with self._lock:
            self._append(TimeSpan(name, start, end, busy))

    def drain(self) -> list[TimeSpan]:
        """Take all spans recorded so far. Open spans are included up to now."""
        with self._lock:
            now = time.monotonic()
            for opened in self._open:
                self._append(TimeSpan(opened.name, opened.start, now, opened.busy))
                opened.start = now
            spans, self._spans = self._spans, []
        return spans

    def _append(self, span: TimeSpan) -> None:
        if self._spans:
            last = self._spans[-1]
            alike = last.name == span.name and last.busy == span.busy
            if (
                alike
                and 0 <= span.start - last.end < self.JOIN_SECONDS
                and span.end - last.start < self.LONGEST_SECONDS
            ):
                self._spans[-1] = TimeSpan(span.name, last.start, span.end, span.busy)
                return
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

    @property
    def rate(self) -> float:
        """The generated tokens per second."""
        return self.tokens / (self.ended - self.started) if self.ended > self.started else 0.0


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
        self._rates[process] = interval.rate
        return interval

    def died(self, process: str) -> float:
        """Forget a process that has ended, and return its last tokens per second."""
        return self._rates.pop(process, 0.0)
