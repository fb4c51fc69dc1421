"""The Gantt chart of a run: how busy every process was over the whole run, and what each did in a few seconds of it.

This module reads timeline.json one span at a time, so a timeline of hours needs only the memory of its picture.
"""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from html import escape
from pathlib import Path

import msgspec

from headrace.observe.charts import Drawing, nice_ticks, svg
from headrace.observe.clock import duration
from headrace.observe.timeline import TimelineSpan, read_timeline

BINS = 240
TONES = "abcdefgh"
WIDTH, LEFT, RIGHT, ROW, GAP = 1080, 96, 62, 26, 10


class TimelineActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline, reduced to what is drawn."""

    seconds: float
    busy: dict[str, list[float]]
    """Process -> the busy fraction of each of `BINS` equal parts of the run."""
    window: tuple[float, float]
    spans: list[TimelineSpan]
    """The spans that touch the window."""


def read_activity(path: Path, window: tuple[float, float] | None = None) -> TimelineActivity | None:
    """Reduce a timeline; None if it is empty. Every span in `window` is kept.

    `window` is in seconds since the start of the run. By default it lies around the middle of the run.
    """
    seconds = max((span.end for span in read_timeline(path)), default=0.0)
    if seconds <= 0:
        return None
    if window is None or window[0] >= min(window[1], seconds):
        window = (max(0.0, seconds / 2 - 2.0), min(seconds, seconds / 2 + 2.0))
    busy: dict[str, BusyBins] = {}
    near: list[TimelineSpan] = []
    for span in read_timeline(path):
        process = busy.setdefault(span.process, BusyBins(seconds))
        if span.busy:
            process.add(span.start, span.end)
        if span.end > window[0] and span.start < window[1]:
            near.append(span)
    fractions = {name: busy[name].finish() for name in sorted(busy, key=_rank)}
    return TimelineActivity(seconds=seconds, busy=fractions, window=window, spans=near)


class BusyBins:
    """The busy fraction of equal parts of a run. Spans may overlap and nest; each moment counts once.

    Spans arrive in the order in which they ended. The last few hundred wait here, so that they can be taken in the
    order in which they started. That order puts a span before the spans inside it.
    """

    WAITING = 512

    def __init__(self, seconds: float) -> None:
        self._bins = [0.0] * BINS
        self._width = seconds / BINS
        self._reach = 0.0
        self._waiting: list[tuple[float, float]] = []

    def add(self, start: float, end: float) -> None:
        """Add a busy span, in seconds since the run's start."""
        heappush(self._waiting, (start, end))
        if len(self._waiting) > self.WAITING:
            self._take()

    def finish(self) -> list[float]:
        """Return the fractions, after all spans have been added."""
        while self._waiting:
            self._take()
        return self._bins

    def _take(self) -> None:
        start, end = heappop(self._waiting)
        start, self._reach = max(start, self._reach), max(end, self._reach)
        for index in range(int(start / self._width), min(BINS - 1, int(end / self._width)) + 1):
            inside = min(end, (index + 1) * self._width) - max(start, index * self._width)
            self._bins[index] = min(1.0, self._bins[index] + max(0.0, inside) / self._width)


def _rank(process: str) -> tuple[int, str]:
    """Sort engines and trainers first, because readers look for them."""
    order = {"engine": 0, "trainer": 1}
    return order.get(process.split("-")[0], 2), process


def overview(activity: TimelineActivity, marks: list[tuple[float, str]]) -> Drawing:
    """Draw the whole run with one strip per process, as high as it was busy. `marks` are moments with a label."""
    top = 20
    bottom = top + len(activity.busy) * (ROW + GAP)
    scale = (WIDTH - LEFT - RIGHT) / activity.seconds
    parts = []
    for row, (process, bins) in enumerate(activity.busy.items()):
        y = top + row * (ROW + GAP)
        mean = sum(bins) / len(bins)
        parts.append(_row_label(process, y))
        parts.append(f'<rect class="track" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}"/>')
        parts.append(f'<path class="area {_tone_of(process)}" d="{_skyline(bins, y)}"/>')
        parts.append(f'<text class="tick" x="{WIDTH - RIGHT + 8}" y="{y + ROW / 2 + 4}">{100 * mean:.0f}%</text>')
        wide = (WIDTH - LEFT - RIGHT) / (BINS / 4)
        for index in range(0, BINS, 4):
            share = sum(bins[index : index + 4]) / 4
            moment = duration(index * activity.seconds / BINS)
            x = LEFT + index / 4 * wide
            parts.append(
                f'<rect class="probe" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}">'
                f"<title>{escape(process)} at {moment}: {100 * share:.0f}% busy</title></rect>"
            )
    for second, label in marks:
        x = LEFT + second * scale
        side = "end" if x > WIDTH / 2 else ""
        parts.append(f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 6}" y2="{bottom - GAP + 4}"/>')
        parts.append(
            f'<text class="note {side}" x="{x + (-6 if side else 6):.1f}" y="{top - 6}">{escape(label)}</text>'
        )
    parts.append(_time_axis(0.0, activity.seconds, bottom))
    return Drawing(svg(WIDTH, bottom + 30, "How busy each process was over the run", "".join(parts)), wide=True)


def close_up(activity: TimelineActivity) -> Drawing:
    """Draw the window: every span with its name, waits as thin bars, and a legend."""
    begin, end = activity.window
    tones = _tones_of_names(activity)
    scale = (WIDTH - LEFT - RIGHT) / (end - begin)
    top = 6
    parts = []
    for row, process in enumerate(activity.busy):
        y = top + row * (ROW + GAP)
        parts.append(_row_label(process, y))
        parts.append(f'<rect class="track" x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}"/>')
        # Draw the longest spans first, so that a short span inside a longer one stays visible.
        for span in sorted((s for s in activity.spans if s.process == process), key=lambda s: s.start - s.end):
            start, stop = max(span.start, begin), min(span.end, end)
            x, width = LEFT + (start - begin) * scale, max(0.6, (stop - start) * scale)
            tone = tones.get(span.name, "other") if span.busy else "wait"
            tip = f"{span.name}: {1e3 * (span.end - span.start):.1f} ms{'' if span.busy else ' (waiting)'}"
            inset = 0 if span.busy else 9
            parts.append(
                f'<rect class="span {tone}" x="{x:.1f}" y="{y + inset}" width="{width:.1f}" height="{ROW - 2 * inset}">'
                f"<title>{escape(process)} · {escape(tip)}</title></rect>"
            )
            if width > 7 * len(span.name) + 10 and span.busy:
                parts.append(f'<text class="inside" x="{x + 5:.1f}" y="{y + ROW / 2 + 4}">{escape(span.name)}</text>')
    bottom = top + len(activity.busy) * (ROW + GAP)
    parts.append(_time_axis(0.0, end - begin, bottom))
    keys = [(tone, name) for name, tone in tones.items()]
    keys += [("other", "other work")] if any(s.busy and s.name not in tones for s in activity.spans) else []
    keys += [("wait", "waiting")] if any(not span.busy for span in activity.spans) else []
    return Drawing(svg(WIDTH, bottom + 30, "What each process did, span by span", "".join(parts)), keys, wide=True)


def _tones_of_names(activity: TimelineActivity) -> dict[str, str]:
    """Choose colours for the names that take most time.

    The main work of engines and of trainers gets their own colour.
    """
    begin, end = activity.window
    taken = Counter[tuple[str, str]]()
    for span in activity.spans:
        if span.busy:
            taken[span.name, _tone_of(span.process)] += round(1e6 * (min(span.end, end) - max(span.start, begin)))
    tones: dict[str, str] = {}
    free = list(TONES)
    for (name, wanted), _ in taken.most_common():
        if name not in tones and wanted in "ab" and wanted in free:
            free.remove(wanted)
            tones[name] = wanted
    for (name, _), _ in taken.most_common():
        if name not in tones and free:
            tones[name] = free.pop(0)
    return tones


def _skyline(bins: list[float], y: float) -> str:
    wide = (WIDTH - LEFT - RIGHT) / len(bins)
    floor = y + ROW
    steps = [f"V{floor - share * ROW:.1f}H{LEFT + (index + 1) * wide:.1f}" for index, share in enumerate(bins)]
    return f"M{LEFT},{floor}{''.join(steps)}V{floor}Z"


def _row_label(process: str, y: float) -> str:
    return f'<text class="row end" x="{LEFT - 10}" y="{y + ROW / 2 + 4}">{escape(process)}</text>'


def _tone_of(process: str) -> str:
    return {"engine": "a", "trainer": "b"}.get(process.split("-")[0], "c")


def _time_axis(begin: float, end: float, y: float) -> str:
    parts = []
    for tick in nice_ticks(begin, end, 9):
        x = LEFT + (tick - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y}"/>')
        label = duration(tick) if tick >= 60 and tick == round(tick) else f"{tick:g} s"
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y + 14}">{label}</text>')
    return "".join(parts)
