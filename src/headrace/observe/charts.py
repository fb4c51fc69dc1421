"""Charts as SVG text: functions from numbers to markup, without scripts and without styles except class names.

Colours and fonts come from the page's CSS (`report.html.jinja`), so one chart fits light and dark mode. Every mark that
stands for a number carries the number as a `<title>`, which browsers show on hover. The Gantt chart reads timeline.json
one span at a time, so a timeline of hours needs only the memory of its picture.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from html import escape
from itertools import pairwise
from pathlib import Path

import msgspec

from headrace.observe.spans import TimeSpan, read_timeline
from headrace.observe.summary import duration

Point = tuple[float, float]


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart."""

    label: str
    points: list[Point]
    tone: str = "a"
    """The CSS colour: `a`, `b`, ... or `faint`."""
    dots: bool = False
    """Whether every point is marked. Lines with few points are marked anyway."""
    hover: bool = True


FEW = 12


class Drawing(msgspec.Struct, frozen=True):
    """A chart as a page shows it."""

    svg: str
    keys: list[tuple[str, str]] = []
    """The legend: pairs of a colour and what it stands for."""
    wide: bool = False
    """Whether the chart keeps its width on a narrow page, which scrolls it."""


class _Frame:
    """The rectangle of the plot, and its two scales from values to pixels."""

    def __init__(self, width: int, height: int, x_range: Point, y_range: Point, *, named: bool = False) -> None:
        self.width, self.height = width, height
        self.x_range, self.y_range = x_range, y_range
        self.left, self.right = 66 if named else 52, width - 14
        self.top, self.bottom = 14, height - 40

    def x(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def grid(self, count: int, label: Callable[[float], str]) -> str:
        """Draw a horizontal line and a label at each of about `count` round values."""
        parts = []
        for tick in nice_ticks(*self.y_range, count=count):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick end" x="{self.left - 8}" y="{y + 4:.1f}">{label(tick)}</text>')
        return "".join(parts)

    def floor(self) -> str:
        return f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>'

    def x_label(self, label: str) -> str:
        middle = (self.left + self.right) / 2
        return f'<text class="label mid" x="{middle:.0f}" y="{self.height - 4}">{escape(label)}</text>'

    def axes(self, x_label: str, y_label: str) -> str:
        """Draw grid lines, ticks at whole x values, and labels."""
        parts = [self.grid(max(3, self.height // 45), tick_label)]
        x_ticks = nice_ticks(*self.x_range, count=max(3, self.width // 75))
        for tick in (t for t in x_ticks if t == round(t)):
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom}" y2="{self.bottom + 4}"/>')
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{self.bottom + 17}">{tick_label(tick)}</text>')
        across = (self.top + self.bottom) / 2
        turned = f'transform="translate(10 {across:.0f}) rotate(-90)"'
        parts += [self.floor(), self.x_label(x_label), f'<text class="label mid" {turned}>{escape(y_label)}</text>']
        return "".join(parts)


def _svg(width: int, height: int, name: str, parts: Sequence[str]) -> str:
    """Return an SVG element that scales with its column, with a name for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}" '
        f'preserveAspectRatio="xMidYMid meet">{"".join(parts)}</svg>'
    )


def _bound(x: float, top: float, bottom: float, label: str, label_y: float, *, before: bool) -> str:
    side, shift = ("end", -6) if before else ("", 6)
    return (
        f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}"/>'
        f'<text class="note {side}" x="{x + shift:.1f}" y="{label_y}">{escape(label)}</text>'
    )


def line_chart(
    series: Sequence[Series],
    *,
    name: str,
    x_label: str,
    y_label: str = "",
    width: int = 520,
    height: int = 260,
    y_range: Point | None = None,
    from_zero: bool = False,
) -> str:
    """Draw lines over shared axes. With `from_zero` the y axis begins at 0, whatever `y_range` says.

    Use `from_zero` for a quantity that is never negative, so that a change is seen in proportion to the whole.
    """
    points = [point for line in series for point in line.points]
    low, high = y_range or _span([y for _, y in points])
    x_range = _span([x for x, _ in points], pad=0.0)
    frame = _Frame(width, height, x_range, (0.0 if from_zero else low, high), named=bool(y_label))
    parts = [frame.axes(x_label, y_label)]
    for line in series:
        # One pixel holds no more than one point; more points would only make the page heavy.
        shown = thin(line.points, frame.right - frame.left)
        path = " ".join(f"{'L' if i else 'M'}{frame.x(x):.1f},{frame.y(y):.1f}" for i, (x, y) in enumerate(shown))
        parts.append(f'<path class="line {line.tone}" d="{path}"/>')
        if line.hover:
            parts += [_hit(line, frame, shown, index) for index in range(len(shown))]
    return _svg(width, height, name, parts)


def _hit(series: Series, frame: _Frame, points: list[Point], index: int) -> str:
    """Draw an invisible column around a point. It shows the point and its numbers on hover."""
    x, y = frame.x(points[index][0]), frame.y(points[index][1])
    before = (frame.x(points[index - 1][0]) + x) / 2 if index else x - 4
    after = (x + frame.x(points[index + 1][0])) / 2 if index + 1 < len(points) else x + 4
    column = (
        f'<rect x="{before:.1f}" y="{frame.top}" width="{after - before:.1f}" height="{frame.bottom - frame.top}"/>'
    )
    if series.dots:
        # Lines with dots often cross: columns would cover dots of other lines, so only a disc around each dot reacts.
        column = f'<circle class="target" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
    tip = f"{series.label} at {tick_label(points[index][0])}: {points[index][1]:.4g}"
    kind = "hit shown" if series.dots or len(points) <= FEW else "hit"
    dot = f'<circle class="dot {series.tone}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    return f'<g class="{kind}">{column}{dot}<title>{escape(tip)}</title></g>'


def lag_chart(tokens: dict[int, int], bound: int | None) -> Drawing | None:
    """Draw the trained tokens by lag, with one bar for each lag from 0 on, and a line after the bound."""
    total = sum(tokens.values())
    if not total:
        return None
    width, height = 520, 260
    shares = {lag: count / total for lag, count in tokens.items()}
    last = max([*shares, bound or 0])
    frame = _Frame(width, height, (-0.5, last + 1.0), (0.0, max(shares.values()) * 1.12))
    thick = min(64.0, (frame.right - frame.left) / (last + 1.5) * 0.72)
    parts = [frame.grid(4, lambda tick: f"{100 * tick:g}%")]
    every = max(1, math.ceil((last + 1) / 16))
    for lag in range(last + 1):
        x, share = frame.x(lag), shares.get(lag, 0.0)
        tone = "bad" if bound is not None and lag > bound else "a"
        if share > 0:
            percent = "<0.1%" if share < 0.001 else f"{100 * share:.1f}%"
            tip = escape(f"lag {lag}: {tokens[lag]:,} tokens ({percent})")
            top = min(frame.y(share), frame.bottom - 1.0)
            body = f'x="{x - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" height="{frame.bottom - top:.1f}" rx="2"'
            parts.append(f'<rect class="bar {tone}" {body}><title>{tip}</title></rect>')
            if last < 12:
                parts.append(f'<text class="tick mid" x="{x:.1f}" y="{top - 5:.1f}">{percent}</text>')
        if lag % every == 0:
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{frame.bottom + 17}">{lag}</text>')
    parts.append(frame.floor())
    if bound is not None:
        x = frame.x(bound + 0.5)
        before = x > width * 0.7
        parts.append(_bound(x, frame.top - 6, frame.bottom, f"bound {bound}", frame.top + 2, before=before))
    parts.append(frame.x_label("lag in versions"))
    return Drawing(_svg(width, height, "Trained tokens by lag", parts))


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers (steps of 1, 2 or 5 times a power of ten) in [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    # Take the step with the nearest ratio to the wanted one. Always rounding up would leave a chart with two ticks.
    step = min((factor * power for factor in (1.0, 2.0, 5.0, 10.0)), key=lambda step: abs(math.log(step / raw)))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    digits = max(0, -math.floor(math.log10(step))) if step < 1 else 0
    return [round(index * step, digits + 1) for index in range(first, last + 1)]


def tick_label(value: float) -> str:
    """Format a round number, short."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e+")
    return f"{value:.6g}"


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """Return at most `limit` points: the means of neighbours, which keep the shape of the curve."""
    if len(points) <= limit:
        return list(points)
    edges = [round(i * len(points) / limit) for i in range(limit + 1)]
    buckets = [points[start:end] for start, end in pairwise(edges)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def moving_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Return each point's mean with the `window - 1` points before it."""
    result: list[Point] = []
    for index, (x, _) in enumerate(points):
        recent = points[max(0, index - window + 1) : index + 1]
        result.append((x, sum(y for _, y in recent) / len(recent)))
    return result


def finite(points: Sequence[tuple[float, float | None]]) -> list[Point]:
    """Return the points that can be drawn: those whose y is not None, NaN or infinite."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _span(values: Sequence[float], pad: float = 0.06) -> Point:
    """Return a range that holds all values and is never empty."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high == low:
        margin = abs(low) * 0.5 or 1.0
        return low - margin, high + margin
    margin = (high - low) * pad
    return low - margin, high + margin


# ---- the Gantt chart: how busy every process was over the whole run, and what each did in a few seconds of it

BINS = 240
TONES = "abcdefgh"
WIDTH, LEFT, INNER, ROW, GAP = 1080, 96, 922, 26, 10
"""The pixels of the chart: its width, where its strips begin, how long and high they are, and between two strips."""


class TimelineActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline, reduced to what is drawn."""

    seconds: float
    busy: dict[str, list[float]]
    """Process -> the busy fraction of each of `BINS` equal parts of the run."""
    window: tuple[float, float]
    spans: list[tuple[str, TimeSpan]]
    """The spans that touch the window, each with its process."""


def read_activity(path: Path, window: tuple[float, float] | None = None) -> TimelineActivity | None:
    """Reduce a timeline; None if it is empty. Every span in `window` is kept.

    `window` is in seconds since the start of the run. By default it lies around the middle of the run.
    """
    seconds = max((span.end for _, span in read_timeline(path)), default=0.0)
    if seconds <= 0:
        return None
    if window is None or window[0] >= min(window[1], seconds):
        window = (max(0.0, seconds / 2 - 2.0), min(seconds, seconds / 2 + 2.0))
    busy: dict[str, _BusyBins] = {}
    near: list[tuple[str, TimeSpan]] = []
    for process, span in read_timeline(path):
        bins = busy.setdefault(process, _BusyBins(seconds))
        if span.busy:
            bins.add(span.start, span.end)
        if span.end > window[0] and span.start < window[1]:
            near.append((process, span))
    fractions = {name: busy[name].finish() for name in sorted(busy, key=lambda process: (_tone_of(process), process))}
    return TimelineActivity(seconds=seconds, busy=fractions, window=window, spans=near)


class _BusyBins:
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
        heappush(self._waiting, (start, end))
        if len(self._waiting) > self.WAITING:
            self._take()

    def finish(self) -> list[float]:
        while self._waiting:
            self._take()
        return self._bins

    def _take(self) -> None:
        start, end = heappop(self._waiting)
        start, self._reach = max(start, self._reach), max(end, self._reach)
        for index in range(int(start / self._width), min(BINS - 1, int(end / self._width)) + 1):
            inside = min(end, (index + 1) * self._width) - max(start, index * self._width)
            self._bins[index] = min(1.0, self._bins[index] + max(0.0, inside) / self._width)


def overview(activity: TimelineActivity, marks: list[tuple[float, str]]) -> Drawing:
    """Draw the whole run with one strip per process, as high as it was busy. `marks` are moments with a label."""
    top = 20
    bottom = top + len(activity.busy) * (ROW + GAP)
    parts = []
    for row, (process, bins) in enumerate(activity.busy.items()):
        y = top + row * (ROW + GAP)
        mean = sum(bins) / len(bins)
        parts.append(_track(process, y))
        step = INNER / len(bins)
        steps = [f"V{y + ROW - busy * ROW:.1f}H{LEFT + (index + 1) * step:.1f}" for index, busy in enumerate(bins)]
        outline = f"M{LEFT},{y + ROW}{''.join(steps)}V{y + ROW}Z"
        parts.append(f'<path class="area {_tone_of(process)}" d="{outline}"/>')
        parts.append(f'<text class="tick" x="{LEFT + INNER + 8}" y="{y + ROW / 2 + 4}">{100 * mean:.0f}%</text>')
        wide = INNER / (BINS / 4)
        for index in range(0, BINS, 4):
            share = sum(bins[index : index + 4]) / 4
            moment = duration(index * activity.seconds / BINS)
            x = LEFT + index / 4 * wide
            parts.append(
                f'<rect class="probe" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}">'
                f"<title>{escape(process)} at {moment}: {100 * share:.0f}% busy</title></rect>"
            )
    for second, label in marks:
        x = LEFT + second * (INNER / activity.seconds)
        parts.append(_bound(x, top - 6, bottom - GAP + 4, label, top - 6, before=x > WIDTH / 2))
    parts.append(_time_axis(activity.seconds, bottom))
    return Drawing(_svg(WIDTH, bottom + 30, "How busy each process was over the run", parts), wide=True)


def close_up(activity: TimelineActivity) -> Drawing:
    """Draw the window: every span with its name, waits as thin bars, and a legend."""
    begin, end = activity.window
    tones = _tones_of_names(activity)
    scale = INNER / (end - begin)
    top = 6
    parts = []
    for row, process in enumerate(activity.busy):
        y = top + row * (ROW + GAP)
        parts.append(_track(process, y))
        # Draw the longest spans first, so that a short span inside a longer one stays visible.
        own = [span for name, span in activity.spans if name == process]
        for span in sorted(own, key=lambda s: s.start - s.end):
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
    parts.append(_time_axis(end - begin, bottom))
    keys = [(tone, name) for name, tone in tones.items()]
    keys += [("other", "other work")] if any(s.busy and s.name not in tones for _, s in activity.spans) else []
    keys += [("wait", "waiting")] if any(not span.busy for _, span in activity.spans) else []
    return Drawing(_svg(WIDTH, bottom + 30, "What each process did, span by span", parts), keys, wide=True)


def _tones_of_names(activity: TimelineActivity) -> dict[str, str]:
    """Choose colours for the names that take most time. The main work of engines and trainers gets their own."""
    begin, end = activity.window
    taken = Counter[tuple[str, str]]()
    for process, span in activity.spans:
        if span.busy:
            taken[span.name, _tone_of(process)] += round(1e6 * (min(span.end, end) - max(span.start, begin)))
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


def _track(process: str, y: float) -> str:
    return (
        f'<text class="row end" x="{LEFT - 10}" y="{y + ROW / 2 + 4}">{escape(process)}</text>'
        f'<rect class="track" x="{LEFT}" y="{y}" width="{INNER}" height="{ROW}"/>'
    )


def _tone_of(process: str) -> str:
    """Return the colour of a process. By this, engines and trainers also come first, because readers look for them."""
    return {"engine": "a", "trainer": "b"}.get(process.split("-")[0], "c")


def _time_axis(seconds: float, y: float) -> str:
    parts = []
    for tick in nice_ticks(0.0, seconds, 9):
        x = LEFT + tick / seconds * INNER
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 4}" y2="{y}"/>')
        label = duration(tick) if tick >= 60 and tick == round(tick) else f"{tick:g} s"
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y + 14}">{label}</text>')
    return "".join(parts)
