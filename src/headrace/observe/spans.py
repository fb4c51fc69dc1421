"""Spans record what a process did, from when to when. Any thread records them; the code that ships them drains them.

Times are seconds of `time.monotonic`, which all processes of one host share. Neighbouring spans of one name are joined,
so that a thousand decode steps make few spans. A span that is still open when spans are drained is cut there, so that a
long step is never reported late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
