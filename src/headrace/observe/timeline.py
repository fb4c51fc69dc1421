"""The file timeline.json: the spans of every process as Chrome trace events, for https://ui.perfetto.dev.

The file is a JSON array with one event per line, written as spans arrive; only the lanes of each process stay in
memory. After `close` the file is valid JSON. A run that was killed leaves an array without its closing bracket. The
trace-event format allows that, so Perfetto and `read_timeline` still load the file. A resumed run continues the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.observe.spans import RunClock, TimeSpan

STARTED = "run started"


class Timeline:
    """The writer of timeline.json for all processes of a run. It is not thread-safe: the controller owns it."""

    def __init__(self, path: Path, clock: RunClock) -> None:
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, list[int]] = {}
        """Process -> when the last event of each of its lanes ends, in microseconds."""
        kept, started = self._recover(path) if path.exists() else (0, None)
        self._file = path.open("r+b" if kept else "wb", buffering=0)
        self._file.seek(kept)
        self._file.truncate()
        self._empty = kept == 0
        if started is None:
            started = clock.wall
            first = {"ph": "i", "s": "g", "name": STARTED, "cat": "run", "ts": 0, "pid": 0, "tid": 0}
            self._write([first | {"args": {"time": started}}])
        self._origin = clock.to_monotonic(started)
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

    def _recover(self, path: Path) -> tuple[int, float | None]:
        """Return how many bytes of an existing file to keep, and when its run started.

        Also restores its processes and lanes.
        """
        kept, started = 0, None
        names: dict[int, str] = {}
        for end, event in _events(path):
            kept = end
            if event["ph"] == "i" and event.get("name") == STARTED:
                started = float(event["args"]["time"])
            elif event["ph"] == "M" and event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "M" and event["name"] == "thread_name":
                self._lanes.setdefault(names[event["pid"]], []).append(0)
        self._pids = {name: pid for pid, name in names.items()}
        return (kept, started) if started is not None else (0, None)


def timeline_started(path: Path) -> float | None:
    """Return when the run of this timeline started, in seconds since 1970."""
    found = (event["args"]["time"] for _, event in _events(path) if event["ph"] == "i" and event.get("name") == STARTED)
    return next(map(float, found), None)


def read_timeline(path: Path) -> Iterator[tuple[str, TimeSpan]]:
    """Yield the spans of a timeline one at a time, each with its process, whether the file was closed or cut.

    Times are seconds since the run's start.
    """
    names: dict[int, str] = {}
    for _, event in _events(path):
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            process = names.get(event["pid"], f"process {event['pid']}")
            start = event["ts"] / 1e6
            yield process, TimeSpan(event["name"], start, start + event["dur"] / 1e6, event["cat"] != "wait")


def _events(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete events of a file, each with the offset at which it ends (before the comma)."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            text = line.rstrip(b",\n")
            try:
                event = msgspec.json.decode(text) if text.startswith(b"{") else None
            except msgspec.DecodeError:
                event = None
            if isinstance(event, dict) and "ph" in event:
                yield offset + len(text), event
            offset += len(line)


def _metadata(kind: str, pid: int, tid: int, **facts: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": facts}
