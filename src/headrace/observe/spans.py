"""Spans record what a process did, from when to when. Any thread records them; the code that ships them drains them.

Times are seconds of `time.monotonic`, which all processes of one host share. Neighbouring spans of one name are joined,
so that a thousand decode steps make few spans. A span that is still open when spans are drained is cut there, so that a
long step is never reported late.

The journal uses wall time. A `RunClock` alone converts between the two. It is read once, at the start of the
controller, so a change of the wall clock never distorts a timeline.

timeline.json holds Chrome trace events for https://ui.perfetto.dev: a JSON array with one event per line. A run that
was killed leaves an array without its closing bracket, which the format allows, so Perfetto and `read_timeline` still
load the file. A resumed run continues the file.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from headrace.errors import DataError

STARTED = "run started"


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

    @classmethod
    def now(cls) -> RunClock:
        """Return the clock of a run that starts now."""
        return cls(wall=time.time(), monotonic=time.monotonic())

    def to_wall(self, monotonic: float) -> float:
        """Return the wall time of a monotonic moment."""
        return self.wall + (monotonic - self.monotonic)


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


class Activity:
    """The last heartbeats of all processes."""

    def __init__(self) -> None:
        self._last_beat: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        """Process -> tokens per second at its last heartbeat."""

    def beat(self, process: str, now: float, spans: Iterable[TimeSpan], tokens: int) -> tuple[float, float]:
        """Return when the last heartbeat of the process was, and for how many seconds it was busy since then.

        The heartbeat was sent at `now` on the sender's monotonic clock. Its spans and tokens are those since the last
        heartbeat. Before the first heartbeat nothing is known, so it begins at `now`.
        """
        started = self._last_beat.get(process, now)
        self._last_beat[process] = now
        self._rates[process] = tokens / (now - started) if now > started else 0.0
        return started, busy_seconds(spans, started, now)

    def died(self, process: str) -> float:
        """Forget a process that has ended, and return its last tokens per second."""
        return self._rates.pop(process, 0.0)

    def left(self, process: str) -> None:
        """Forget a process that was ended on purpose. The time until it is started again is not idle."""
        self._last_beat.pop(process, None)
        self._rates.pop(process, None)


class Timeline:
    """The writer of timeline.json for all processes of a run. It is not thread-safe: the controller owns it."""

    def __init__(self, path: Path, clock: RunClock) -> None:
        """Begin a timeline, or go on with one. Raises `DataError` if the file is there but is not a timeline."""
        kept, started, names, lanes = _scan(path) if path.exists() else (0, None, {}, {})
        self._pids = {name: pid for pid, name in names.items()}
        self._lanes = lanes
        """Process -> when the last event of each of its lanes ends, in microseconds."""
        self._file = path.open("r+b" if kept else "wb", buffering=0)
        self._file.seek(kept)
        self._file.truncate()
        self._empty = kept == 0
        if started is None:
            started = clock.wall
            first = {"ph": "i", "s": "g", "name": STARTED, "cat": "run", "ts": 0, "pid": 0, "tid": 0}
            self._write([first | {"args": {"time": started}}])
        self._origin = clock.monotonic + (started - clock.wall)
        """The monotonic time of the run's start."""

    def add(self, process: str, spans: Sequence[TimeSpan]) -> None:
        """Append spans of a process, in the order in which they ended. All of them are written at once."""
        events: list[dict[str, Any]] = []
        if process not in self._pids:
            pid = self._pids[process] = len(self._pids) + 1
            events.append(_metadata("process_name", pid, 0, name=process))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
        pid = self._pids[process]
        for span in spans:
            start, end = (round((moment - self._origin) * 1e6) for moment in (span.start, span.end))
            lane, is_new = self._lane(process, start, end)
            if is_new:
                events.append(_metadata("thread_name", pid, lane, name="work" if lane == 1 else f"work {lane}"))
            event = {"ph": "X", "name": span.name, "cat": "work" if span.busy else "wait", "ts": start}
            events.append(event | {"dur": max(0, end - start), "pid": pid, "tid": lane})
        self._write(events)

    def close(self) -> None:
        """End the array and close the file. Idempotent."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def _lane(self, process: str, start: int, end: int) -> tuple[int, bool]:
        """Find a lane in which the span overlaps nothing, because viewers cannot show overlaps within one thread."""
        ends = self._lanes.setdefault(process, [])
        for index, last in enumerate(ends):
            if last <= start:
                ends[index] = end
                return index + 1, False
        ends.append(end)
        return len(ends), True

    def _write(self, events: list[dict[str, Any]]) -> None:
        if events:
            lead = b"[\n" if self._empty else b",\n"
            self._file.write(lead + b",\n".join(map(msgspec.json.encode, events)))
            self._empty = False


def _scan(path: Path) -> tuple[int, float | None, dict[int, str], dict[str, list[int]]]:
    """Return how many bytes of a timeline are whole, when its run started, its processes and their lanes.

    Raises `DataError` if the file is not a timeline, or one that was cut at its end.
    """
    kept, started = 0, None
    names: dict[int, str] = {}
    lanes: dict[str, list[int]] = {}
    try:
        for end, event in _events(path, whole=True):
            kept = end
            if event["ph"] == "i" and event.get("name") == STARTED:
                started = float(event["args"]["time"])
            elif event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "M" and event["name"] == "thread_name":
                lanes.setdefault(names[event["pid"]], []).append(0)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is damaged: the event before byte {kept} is not one of a timeline") from error
    if kept and started is None:
        raise DataError(f"{path} is damaged: it does not say when its run started")
    return kept, started, names, lanes


def timeline_damage(path: Path) -> str:
    """Return one line about what is wrong with a timeline; empty if nothing is, or if there is none."""
    try:
        _scan(path)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except DataError as error:
        return str(error)
    return ""


def timeline_started(path: Path) -> float | None:
    """Return when the run of this timeline started, in seconds since 1970; None if the file does not say it."""
    try:
        found = (event["args"]["time"] for _, event in _events(path) if event.get("name") == STARTED)
        return next(map(float, found), None)
    except (OSError, KeyError, TypeError, ValueError):
        return None


def read_timeline(path: Path) -> Iterator[tuple[str, TimeSpan]]:
    """Yield the spans of a closed or cut timeline, with their process. Times are seconds since the run's start.

    Damaged events are left out: `timeline_damage` finds them.
    """
    names: dict[int, str] = {}
    for _, event in _events(path):
        with suppress(KeyError, TypeError):
            if event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = str(event["args"]["name"])
            elif event["ph"] == "X":
                process = names.get(event["pid"], f"process {event['pid']}")
                start, seconds = event["ts"] / 1e6, event["dur"] / 1e6
                yield process, TimeSpan(str(event["name"]), start, start + seconds, event["cat"] != "wait")


def _events(path: Path, *, whole: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete events of a file, each with the offset at which it ends (before the comma).

    With `whole`, raise `DataError` for a line that is no event. A crash cuts only the last line, and never the first.
    """
    offset = 0
    with path.open("rb") as file:
        for line in file:
            text = line.rstrip(b",\n")
            try:
                event = msgspec.json.decode(text) if text.startswith(b"{") else None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                event = None
            if isinstance(event, dict) and "ph" in event:
                yield offset + len(text), event
            elif whole and (line.endswith(b"\n") or not offset) and text not in (b"[", b"", b"]"):
                raise DataError(f"{path} is damaged: no event in the line at byte {offset}")
            offset += len(line)


def _metadata(kind: str, pid: int, tid: int, **facts: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": facts}
