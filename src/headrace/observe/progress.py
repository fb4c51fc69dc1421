"""The progress display of a run: a live panel, plain lines, or nothing. It takes almost no CPU time.

A display never asks the pipeline anything: the controller fills a snapshot at each tick and hands it over. Rates follow
from several snapshots. The cores of the machine belong to engines and trainers, so a display draws at most a few times
a second, however often it is updated. It has no thread of its own, so it costs nothing while nobody updates it.
"""

import time
from collections import deque
from collections.abc import Callable
from copy import copy
from io import StringIO
from typing import Any, Literal

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from headrace.errors import one_line
from headrace.observe.summary import compact, duration, lag_mean_and_max

LABEL, QUIET, STRONG = "cyan", "dim", "bold"
NOTE_LENGTH = 1000
MAX_PROCESSES = 10
MAX_LAGS = 8
PHASE_STYLES = {"training": "green", "evaluating": "magenta", "draining": "yellow", "done": "green"}


class ProcessActivity(msgspec.Struct, kw_only=True):
    """What a process is doing now, and how busy it was recently."""

    phase: str = ""
    busy_fraction: float = 0.0


class RunSnapshot(msgspec.Struct, kw_only=True):
    """The state of a run at one moment. Token counts are totals since the start, never rates."""

    phase: str = "starting"
    """The phase of the run: starting, warm start, evaluating, training, draining, ..."""
    version: int = 0
    versions_total: int = 0
    step: int = 0
    reward: float | None = None
    """The mean reward of the last step."""
    reward_mean: float | None = None
    """The moving mean of the reward."""
    heldout: float | None = None
    """The last held-out accuracy."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    lag_histogram: dict[int, int] = {}
    """Lag -> the number of trained tokens with this lag."""
    lag_bound: int | None = None
    in_flight: int = 0
    capacity: int = 0
    ready: int = 0
    """The number of groups in flight that wait to be trained."""
    processes: dict[str, ProcessActivity] = {}
    message: str = ""

    def idle(self, role: str) -> float | None:
        """Return the mean idle fraction of the processes of a role (`engine`, `trainer`)."""
        busy = [activity.busy_fraction for name, activity in self.processes.items() if name.startswith(role + "-")]
        return 1.0 - sum(busy) / len(busy) if busy else None


class SlidingRate:
    """The rate at which a total grew over the last `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._points: deque[tuple[float, float]] = deque()

    def add(self, time: float, total: float) -> float | None:
        """Add the total at this time, and return the rate per second; None until two points are known."""
        points = self._points
        if points and total < points[-1][1]:
            points.clear()  # The run was resumed, so a new window starts.
        points.append((time, total))
        # The oldest point kept lies at or just before the start of the window, so the rate spans a whole window.
        while len(points) > 2 and points[1][0] <= time - self._window:
            points.popleft()
        first, low = points[0]
        return (total - low) / (time - first) if time > first else None


class Rates:
    """The tokens per second and the time left, computed from successive snapshots."""

    TOKEN_WINDOW = 15.0
    VERSION_WINDOW = 120.0

    def __init__(self) -> None:
        self.generated: float | None = None
        self.trained: float | None = None
        self.seconds_left: float | None = None
        """The seconds until the last version, at the rate of the last minutes."""
        self._generated = SlidingRate(self.TOKEN_WINDOW)
        self._trained = SlidingRate(self.TOKEN_WINDOW)
        self._versions = SlidingRate(self.VERSION_WINDOW)
        self._pace: float | None = None

    def add(self, time: float, snapshot: RunSnapshot) -> None:
        """Add a snapshot, taken at this time."""
        self.generated = self._generated.add(time, snapshot.generated_tokens)
        self.trained = self._trained.add(time, snapshot.trained_tokens)
        if snapshot.phase == "training":
            # A start or an evaluation before training says nothing about the rate of versions.
            self._pace = self._versions.add(time, snapshot.version)
        remaining = max(0, snapshot.versions_total - snapshot.version)
        self.seconds_left = remaining / self._pace if self._pace else None


class Progress:
    """A display of progress. A method returns at once, never raises, and by default does nothing."""

    def start(self) -> None:
        """Start the display. Called once, before anything else."""

    def update(self, snapshot: RunSnapshot) -> None:
        """Display the current state. May be called at any rate; the caller may reuse the struct afterwards."""

    def note(self, line: str) -> None:
        """Print a line that stays: an evaluation's result, a warning."""

    def stop(self) -> None:
        """Show the last state and release the terminal. Idempotent, and allowed without `start`."""


class NoProgress(Progress):
    """A display that shows nothing."""


class _ConsoleProgress(Progress):
    """The state that both displays on a console have."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._rates = Rates()
        self._snapshot: RunSnapshot | None = None

    def note(self, line: str) -> None:
        self._console.print(one_line(line, NOTE_LENGTH), markup=False, highlight=False, soft_wrap=True)

    def _take(self, now: float, snapshot: RunSnapshot) -> RunSnapshot | None:
        """Keep the snapshot, and return the one before it."""
        self._rates.add(now, snapshot)
        # A copy, because the controller fills the same struct again and again.
        last, self._snapshot = self._snapshot, copy(snapshot)
        return last


class PlainProgress(_ConsoleProgress):
    """A display that prints a line every few seconds, and at once when the phase or the held-out accuracy changes."""

    def __init__(self, console: Console, *, every: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._every = every
        self._printed: tuple[float, str] | None = None

    def update(self, snapshot: RunSnapshot) -> None:
        """Print a line if enough time has passed, or if something has changed."""
        now = self._clock()
        last = self._take(now, snapshot)
        happened = last is None or last.phase != snapshot.phase or last.heldout != snapshot.heldout
        if happened or self._printed is None or now - self._printed[0] >= self._every:
            self._print(now, _plain_line(snapshot, self._rates))

    def stop(self) -> None:
        """Print the last state, unless it is already the last line."""
        if self._snapshot is not None:
            self._print(self._clock(), _plain_line(self._snapshot, self._rates))
            self._snapshot = None

    def _print(self, now: float, line: str) -> None:
        if self._printed is None or self._printed[1] != line:
            self.note(line)
        self._printed = (now, line)


def _plain_line(snapshot: RunSnapshot, rates: Rates) -> str:
    """Describe a snapshot in one line. What is not known yet is left out."""
    parts = [] if snapshot.phase == "training" else [snapshot.phase]
    if snapshot.versions_total:
        parts.append(f"version {snapshot.version}/{snapshot.versions_total}")
    if snapshot.reward_mean is not None:
        parts.append(f"reward {snapshot.reward_mean:.3f}")
    if snapshot.heldout is not None:
        parts.append(f"held-out {snapshot.heldout:.3f}")
    if rates.generated:
        parts.append(f"gen {compact(rates.generated)} tok/s")
    if rates.trained:
        parts.append(f"trained {compact(rates.trained)} tok/s")
    mean, most = lag_mean_and_max(snapshot.lag_histogram)
    if mean is not None:
        bound = "" if snapshot.lag_bound is None else f" (bound {snapshot.lag_bound})"
        parts.append(f"lag mean {mean:.2f} max {most}{bound}")
    idle = {role: snapshot.idle(role) for role in ("trainer", "engine")}
    known = [f"{role} {100 * fraction:.0f}%" for role, fraction in idle.items() if fraction is not None]
    if known:
        parts.append("idle " + " ".join(known))
    if snapshot.phase == "training" and rates.seconds_left is not None:
        parts.append(f"{duration(rates.seconds_left)} left")
    if snapshot.message:
        parts.append(snapshot.message)
    return " · ".join(parts)


class Glyphs:
    """The characters that bars are made of. Plain characters are used where the terminal has no others."""

    def __init__(self, *, ascii_only: bool) -> None:
        self.full, self.empty = ("#", "-") if ascii_only else ("━", "─")
        self.levels = "_.:-=+*#" if ascii_only else "▁▂▃▄▅▆▇█"
        self.arrow, self.bound = ("->", "|") if ascii_only else ("→", "┃")
        self.dot = "-" if ascii_only else "·"

    def bar(self, fraction: float, width: int, style: str) -> Text:
        """Return a horizontal bar."""
        filled = round(min(1.0, max(0.0, fraction)) * width)
        return Text.assemble((self.full * filled, style), (self.empty * (width - filled), QUIET))

    def level(self, fraction: float) -> str:
        """Return one character whose height is the fraction."""
        return self.levels[min(len(self.levels) - 1, int(max(0.0, fraction) * len(self.levels)))]

    def sparkline(self, values: list[float]) -> str:
        """Return one character per value, scaled between the smallest and the largest value."""
        if not values:
            return ""
        low, high = min(values), max(values)
        return "".join(self.level((value - low) / (high - low) if high > low else 0.5) for value in values)


class LiveProgress(_ConsoleProgress):
    """A display that is one panel in the terminal, drawn at most twice a second and only when it is updated."""

    SECONDS_BETWEEN = 0.5
    SPARKS = 40

    def __init__(
        self, console: Console, *, title: str = "headrace", clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(console, clock)
        self._title = title
        self._glyphs = Glyphs(ascii_only=console.options.ascii_only)
        self._live = Live(console=console, auto_refresh=False)
        self._started = clock()
        self._drawn: float | None = None
        self._rewards: deque[float] = deque(maxlen=self.SPARKS)
        self._heldout: list[float] = []

    def start(self) -> None:
        """Take over the terminal."""
        self._started = self._clock()
        self._live.start()

    def update(self, snapshot: RunSnapshot) -> None:
        """Store the snapshot, and draw it unless the last drawing is too recent."""
        now = self._clock()
        last = self._take(now, snapshot)
        if snapshot.reward is not None and (last is None or last.step != snapshot.step):
            self._rewards.append(snapshot.reward)
        if snapshot.heldout is not None and (last is None or last.heldout != snapshot.heldout):
            self._heldout.append(snapshot.heldout)
        if self._drawn is None or now - self._drawn >= self.SECONDS_BETWEEN:
            self._draw(snapshot, now)

    def stop(self) -> None:
        """Draw the last state and leave it on the screen."""
        if self._live.is_started:
            if self._snapshot is not None:
                self._draw(self._snapshot, self._clock())
            self._live.stop()

    def _draw(self, snapshot: RunSnapshot, now: float) -> None:
        self._drawn = now
        self._live.update(self.render(snapshot, now), refresh=self._live.is_started)

    def render(self, snapshot: RunSnapshot, now: float) -> RenderableType:
        """Return the panel for a snapshot."""
        bar_width = max(10, min(40, self._console.width - 52))
        processes = self._processes(snapshot, bar_width)
        table = Table.grid(padding=(0, 2))
        # On a narrow terminal, values are cut but their labels are not.
        table.add_column(style=LABEL, no_wrap=True, min_width=max([8, *[len(name) for name, _ in processes]]))
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row("version", self._versions(snapshot, now, bar_width))
        table.add_row("reward", self._reward(snapshot))
        table.add_row("held-out", self._heldout_line())
        table.add_row("tokens", self._tokens(snapshot))
        table.add_row("lag", self._lag(snapshot))
        table.add_row("buffer", self._buffer(snapshot, bar_width))
        for name, cells in processes:
            table.add_row(name, cells)
        parts: list[RenderableType] = [table]
        if snapshot.message:
            parts.append(Text(snapshot.message, style="yellow"))
        phase = Text(f" {snapshot.phase} ", style=f"bold {PHASE_STYLES.get(snapshot.phase, 'blue')}")
        title = Text.assemble((f" {self._title} ", STRONG), (self._glyphs.dot, QUIET), phase)
        width = min(self._console.width, 104)
        return Panel(
            Group(*parts), title=title, title_align="left", border_style="bright_black", padding=(0, 1), width=width
        )

    def _versions(self, snapshot: RunSnapshot, now: float, width: int) -> Text:
        total = snapshot.versions_total
        fraction = snapshot.version / total if total else 0.0
        text = Text.assemble(self._glyphs.bar(fraction, width, "green"), f" {snapshot.version}/{total}")
        text.append(f"  {100 * fraction:.0f}%", STRONG)
        text.append(f"  {duration(now - self._started)}", QUIET)
        left = self._rates.seconds_left
        if left is not None and snapshot.phase == "training":
            text.append(f"  {duration(left)} left")
        return text

    def _reward(self, snapshot: RunSnapshot) -> Text:
        if snapshot.reward is None:
            return Text("none yet", QUIET)
        text = Text().append(f"{snapshot.reward:.3f}", STRONG)
        if snapshot.reward_mean is not None:
            text.append(f"  mean {snapshot.reward_mean:.3f}")
        return text.append("  ").append(self._glyphs.sparkline(list(self._rewards)), "green")

    def _heldout_line(self) -> Text:
        if not self._heldout:
            return Text("none yet", QUIET)
        shown = self._heldout if len(self._heldout) <= 6 else [self._heldout[0], *self._heldout[-5:]]
        text = Text()
        for index, value in enumerate(shown):
            if index:
                skipped = index == 1 and len(shown) < len(self._heldout)
                text.append(f" {self._glyphs.arrow} {'... ' if skipped else ''}", QUIET)
            text.append(f"{value:.3f}", STRONG if index == len(shown) - 1 else "")
        return text

    def _tokens(self, snapshot: RunSnapshot) -> Text:
        text = Text()
        pairs = (
            ("generated", self._rates.generated, snapshot.generated_tokens),
            ("trained", self._rates.trained, snapshot.trained_tokens),
        )
        for index, (verb, rate, total) in enumerate(pairs):
            text.append("    " if index else "").append(f"{verb} ")
            text.append(f"{compact(rate or 0.0)}/s", STRONG).append(f" ({compact(total)})", QUIET)
        return text

    def _lag(self, snapshot: RunSnapshot) -> Text:
        mean, most = lag_mean_and_max(snapshot.lag_histogram)
        if mean is None:
            return Text("nothing trained yet", QUIET)
        # The figures come first: on a narrow terminal the end of the line is cut.
        text = Text(f"mean {mean:.2f}  max {most}")
        if snapshot.lag_bound is not None:
            text.append(f"  bound {snapshot.lag_bound}", "yellow")
        text.append("   ")
        tokens = sum(snapshot.lag_histogram.values())
        last = max(*snapshot.lag_histogram, snapshot.lag_bound or 0)
        for lag in range(min(last, MAX_LAGS - 1) + 1):
            share = snapshot.lag_histogram.get(lag, 0) / tokens
            over = snapshot.lag_bound is not None and lag > snapshot.lag_bound
            text.append(f"{lag} ", QUIET)
            text.append(self._glyphs.level(share) if share else " ", "red" if over else "blue")
            text.append(f"{100 * share:3.0f}%  ")
            if lag == snapshot.lag_bound:
                text.append(f"{self._glyphs.bound} ", "yellow")
        return text

    def _buffer(self, snapshot: RunSnapshot, width: int) -> Text:
        fraction = snapshot.in_flight / snapshot.capacity if snapshot.capacity else 0.0
        text = self._glyphs.bar(fraction, width, "blue")
        text.append(f" {snapshot.in_flight}/{snapshot.capacity} groups in flight")
        return text.append(f", {snapshot.ready} ready", QUIET)

    def _processes(self, snapshot: RunSnapshot, width: int) -> list[tuple[str, Text]]:
        shown = sorted(snapshot.processes.items())
        lines = [(name, self._process(activity, width)) for name, activity in shown[:MAX_PROCESSES]]
        rest = shown[MAX_PROCESSES:]
        if rest:
            busy = sum(activity.busy_fraction for _, activity in rest) / len(rest)
            lines.append((f"+ {len(rest)} more", self._process(ProcessActivity(busy_fraction=busy), width)))
        return lines

    def _process(self, activity: ProcessActivity, width: int) -> Text:
        text = self._glyphs.bar(activity.busy_fraction, width, "green")
        text.append(f" {100 * min(1.0, max(0.0, activity.busy_fraction)):3.0f}% busy")
        return text.append(f"  {activity.phase}", QUIET)


class NotebookProgress(LiveProgress):
    """The panel of `LiveProgress` as one output of a notebook's cell. Notes are outputs after it."""

    WIDTH = 104
    SECONDS_BETWEEN = 1.0
    FORMAT = '<pre style="line-height: 1.2; font-family: monospace">{code}</pre>'

    def __init__(
        self, console: Console, *, title: str = "headrace", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._paper = Console(file=StringIO(), record=True, width=self.WIDTH, force_jupyter=False, force_terminal=True)
        super().__init__(self._paper, title=title, clock=clock)
        self._cell = console
        self._handle: Any = None

    def start(self) -> None:
        """Make the output."""
        self._started = self._clock()
        self._show(Text("starting"))

    def note(self, line: str) -> None:
        """Print a line in the cell."""
        self._cell.print(one_line(line, NOTE_LENGTH), markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Draw the last state, which stays in the notebook."""
        if self._snapshot is not None:
            self._draw(self._snapshot, self._clock())
            self._snapshot = None

    def _draw(self, snapshot: RunSnapshot, now: float) -> None:
        self._drawn = now
        self._show(self.render(snapshot, now))

    def _show(self, panel: RenderableType) -> None:
        from IPython.display import HTML, display

        self._paper.print(panel)
        html = HTML(self._paper.export_html(inline_styles=True, code_format=self.FORMAT))
        if self._handle is None:
            # By an id the output is found again from any thread.
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)


def make_progress(
    kind: Literal["auto", "live", "plain", "none"] = "auto", console: Console | None = None, *, title: str = "headrace"
) -> Progress:
    """Make the display that `[observe] display` asks for.

    `auto` is live on a terminal and in a notebook, and plain lines elsewhere.
    """
    console = console or Console()
    if console.is_jupyter and kind in ("auto", "live"):
        return NotebookProgress(console, title=title)
    drawable = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
    if kind == "none":
        return NoProgress()
    if drawable and kind != "plain":
        return LiveProgress(console, title=title)
    plain = PlainProgress(console)
    if kind == "live":
        plain.note('[observe] display = "live" needs a terminal; showing plain lines instead')
    return plain
