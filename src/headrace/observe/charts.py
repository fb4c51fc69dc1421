"""Charts as SVG text: pure functions from numbers to markup, without scripts and without styles except class names.

Colours and fonts come from the page's CSS (`report.html.jinja`), so one chart fits light and dark mode. Every mark that
stands for a number carries the number as a `<title>`, which browsers show on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise

import msgspec

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


class Frame:
    """The rectangle of the plot, and its two scales."""

    LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 40

    def __init__(self, width: int, height: int, x_range: Point, y_range: Point, *, named: bool = False) -> None:
        self.width, self.height = width, height
        self.x_range, self.y_range = x_range, y_range
        self.left, self.right = self.LEFT + (14 if named else 0), width - self.RIGHT
        self.top, self.bottom = self.TOP, height - self.BOTTOM

    def x(self, value: float) -> float:
        """Return the position of an x value in pixels."""
        low, high = self.x_range
        return self.left + (self.right - self.left) * (value - low) / (high - low)

    def y(self, value: float) -> float:
        """Return the position of a y value in pixels."""
        low, high = self.y_range
        return self.bottom - (self.bottom - self.top) * (value - low) / (high - low)

    def grid(self, ticks: Sequence[float], label: Callable[[float], str]) -> str:
        """Draw a horizontal line and a label at each tick."""
        parts = []
        for tick in ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick end" x="{self.left - 8}" y="{y + 4:.1f}">{label(tick)}</text>')
        return "".join(parts)

    def floor(self) -> str:
        """Draw the x axis."""
        return f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>'

    def x_label(self, label: str) -> str:
        """Draw the label of the x axis."""
        middle = (self.left + self.right) / 2
        return f'<text class="label mid" x="{middle:.0f}" y="{self.height - 4}">{escape(label)}</text>'

    def axes(self, x_label: str, y_label: str) -> str:
        """Draw grid lines, ticks at whole x values, and labels."""
        parts = [self.grid(nice_ticks(*self.y_range, count=max(3, self.height // 45)), tick_label)]
        x_ticks = nice_ticks(*self.x_range, count=max(3, self.width // 75))
        for tick in (t for t in x_ticks if t == round(t)):
            x = self.x(tick)
            parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{self.bottom}" y2="{self.bottom + 4}"/>')
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{self.bottom + 17}">{tick_label(tick)}</text>')
        parts += [self.floor(), self.x_label(x_label)]
        across = (self.top + self.bottom) / 2
        parts.append(
            f'<text class="label mid" transform="translate(10 {across:.0f}) rotate(-90)">{escape(y_label)}</text>'
        )
        return "".join(parts)


def svg(width: int, height: int, name: str, body: str) -> str:
    """Return an SVG element that scales with its column, with a name for screen readers."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}" '
        f'preserveAspectRatio="xMidYMid meet">{body}</svg>'
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
    """Draw lines over shared axes.

    With `from_zero` the y axis begins at 0, whatever `y_range` says. Use it for quantities that are never negative, so
    that a change is seen in proportion to the whole.
    """
    points = [point for line in series for point in line.points]
    low, high = y_range or _span([y for _, y in points])
    frame = Frame(
        width, height, _span([x for x, _ in points], pad=0.0), (0.0 if from_zero else low, high), named=bool(y_label)
    )
    marks = "".join(_line(line, frame) for line in series)
    return svg(width, height, name, frame.axes(x_label, y_label) + marks)


def _line(series: Series, frame: Frame) -> str:
    # One pixel holds no more than one point; more points would only make the page heavy.
    points = thin(series.points, frame.right - frame.left)
    path = " ".join(f"{'L' if i else 'M'}{frame.x(x):.1f},{frame.y(y):.1f}" for i, (x, y) in enumerate(points))
    parts = [f'<path class="line {series.tone}" d="{path}"/>']
    if series.hover:
        parts += [_hit(series, frame, points, index) for index in range(len(points))]
    return "".join(parts)


def _hit(series: Series, frame: Frame, points: list[Point], index: int) -> str:
    """Draw an invisible column around a point. It shows the point and its numbers on hover."""
    x, y = frame.x(points[index][0]), frame.y(points[index][1])
    before = (frame.x(points[index - 1][0]) + x) / 2 if index else x - 4
    after = (x + frame.x(points[index + 1][0])) / 2 if index + 1 < len(points) else x + 4
    column = (
        f'<rect x="{before:.1f}" y="{frame.top}" width="{after - before:.1f}" height="{frame.bottom - frame.top}"/>'
    )
    if series.dots:
        # Lines with dots often cross, and the column of one line would cover the dots of another. So only a disc around
        # each dot reacts to the pointer.
        column = f'<circle class="target" cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
    tip = f"{series.label} at {tick_label(points[index][0])}: {value_label(points[index][1])}"
    kind = "hit shown" if series.dots or len(points) <= FEW else "hit"
    dot = f'<circle class="dot {series.tone}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    return f'<g class="{kind}">{column}{dot}<title>{escape(tip)}</title></g>'


def bar_chart(
    shares: dict[int, float], tips: dict[int, str], *, name: str, x_label: str, bound: int | None, height: int = 260
) -> str:
    """Draw one bar for each integer from 0 on. Each bar is a share of the whole. A line stands after the bound."""
    width = 520
    last = max([*shares, bound or 0])
    frame = Frame(width, height, (-0.5, last + 1.0), (0.0, max(shares.values(), default=0.0) * 1.12 or 1.0))
    slot = (frame.right - frame.left) / (last + 1.5)
    thick = min(64.0, slot * 0.72)
    parts = [frame.grid(nice_ticks(*frame.y_range, count=4), lambda tick: f"{100 * tick:g}%")]
    every = max(1, math.ceil((last + 1) / 16))
    for key in range(last + 1):
        x, share = frame.x(key), shares.get(key, 0.0)
        tone = "bad" if bound is not None and key > bound else "a"
        if share > 0:
            top = min(frame.y(share), frame.bottom - 1.0)
            body = f'x="{x - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" height="{frame.bottom - top:.1f}" rx="2"'
            parts.append(f'<rect class="bar {tone}" {body}><title>{escape(tips.get(key, ""))}</title></rect>')
            if last < 12:
                parts.append(f'<text class="tick mid" x="{x:.1f}" y="{top - 5:.1f}">{percent_label(share)}</text>')
        if key % every == 0:
            parts.append(f'<text class="tick mid" x="{x:.1f}" y="{frame.bottom + 17}">{key}</text>')
    parts.append(frame.floor())
    if bound is not None:
        x = frame.x(bound + 0.5)
        parts.append(f'<line class="bound" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top - 6}" y2="{frame.bottom}"/>')
        side, shift = ("end", -6) if x > width * 0.7 else ("", 6)
        parts.append(f'<text class="note {side}" x="{x + shift:.1f}" y="{frame.top + 2}">bound {bound}</text>')
    parts.append(frame.x_label(x_label))
    return svg(width, height, name, "".join(parts))


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


def value_label(value: float) -> str:
    """Format a measured number with about four digits."""
    return f"{value:.4g}"


def percent_label(share: float) -> str:
    """Format a share as a percentage. It is not 0 unless the share is 0."""
    return "<0.1%" if 0 < share < 0.001 else f"{100 * share:.1f}%"


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
