"""Spans: what a process did, from when to when. Recorded anywhere, drained by whoever ships them.

Times are seconds of `time.monotonic`, which all processes of one host share. Neighbouring spans of one name are
joined, so that a thousand decode steps cost one span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Something that took time."""

    name: str
    start: float
    end: float
    busy: bool = True
    """False for a wait: time in which this process had nothing to do."""


class SpanRecorder:
    """Collects the spans of one process. Safe to use from several threads."""

    JOIN_SECONDS = 0.002
    LONGEST_SECONDS = 1.0

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, name: str, *, busy: bool = True) -> Iterator[None]:
        """Record the time that the body takes."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic(), busy=busy)

    def add(self, name: str, start: float, end: float, *, busy: bool = True) -> None:
        """Record a span, joined to the last one if that is its neighbour of the same name."""
        with self._lock:
            if self._spans:
                last = self._spans[-1]
                neighbours = last.name == name and last.busy == busy and start - last.end < self.JOIN_SECONDS
                if neighbours and end - last.start < self.LONGEST_SECONDS:
                    self._spans[-1] = Span(name, last.start, end, busy)
                    return
            self._spans.append(Span(name, start, end, busy))

    def drain(self) -> list[Span]:
        """Take all spans recorded so far."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
