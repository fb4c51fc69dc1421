import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.observe.progress import (
    Glyphs,
    LiveProgress,
    NoProgress,
    PlainProgress,
    ProcessActivity,
    Rates,
    RunSnapshot,
    SlidingRate,
    make_progress,
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool = False, width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, color_system=None, legacy_windows=False)


def printed(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def snapshot(version: int, **changes: object) -> RunSnapshot:
    base: dict[str, object] = {
        "phase": "training",
        "version": version,
        "versions_total": 300,
        "step": version,
        "reward": 0.5,
        "reward_mean": 0.41,
        "heldout": 0.38,
        "generated_tokens": 1200 * version,
        "trained_tokens": 900 * version,
        "lag_histogram": {0: 50, 1: 150},
        "lag_bound": 2,
        "in_flight": 24,
        "capacity": 32,
        "ready": 3,
        "processes": {
            "engine-0": ProcessActivity(phase="decode", busy_fraction=0.9),
            "engine-1": ProcessActivity(phase="decode", busy_fraction=0.7),
            "trainer-0": ProcessActivity(phase="step", busy_fraction=0.95),
        },
    }
    return RunSnapshot(**{**base, **changes})  # type: ignore[arg-type]


def test_a_plain_line_says_it_all():
    clock, target = Clock(), console()
    progress = PlainProgress(target, clock=clock)
    progress.start()
    progress.update(snapshot(0, phase="starting", heldout=None))
    for version in range(11, 13):
        clock.now = float(version)
        progress.update(snapshot(version))
    progress.stop()
    lines = printed(target).splitlines()
    assert lines[0].startswith("starting · version 0/300")
    assert lines[-1] == (
        "version 12/300 · reward 0.410 · held-out 0.380 · gen 1.2k tok/s · trained 900 tok/s · "
        "lag mean 0.75 max 1 (bound 2) · idle trainer 5% engine 20% · 4:48 left"
    )


def test_plain_lines_come_every_few_seconds_and_at_each_evaluation():
    clock, target = Clock(), console()
    progress = PlainProgress(target, every=5.0, clock=clock)
    for tick in range(100):
        clock.now = tick * 0.1
        progress.update(snapshot(tick, heldout=0.5 if tick >= 20 else 0.4))
    versions = [line.split(" ")[1] for line in printed(target).splitlines()]
    assert versions == ["0/300", "20/300", "70/300"]
    progress.stop()
    progress.stop()
    assert [line.split(" ")[1] for line in printed(target).splitlines()][3:] == ["99/300"]


def test_one_struct_may_be_filled_again_and_again():
    clock, target = Clock(), console(terminal=True, width=120)
    plain, live = PlainProgress(target, every=1000.0, clock=clock), LiveProgress(target, clock=clock)
    shown = snapshot(1, heldout=None)
    for version, heldout in ((1, None), (2, 0.25), (3, 0.25), (4, 0.75)):
        clock.now = float(version)
        shown.version = shown.step = version
        shown.reward, shown.heldout = version / 4, heldout
        plain.update(shown)
        live.update(shown)
    assert [line.split(" ")[1] for line in printed(target).splitlines()] == ["1/300", "2/300", "4/300"]
    with target.capture() as capture:
        target.print(live.render(shown, 5.0))
    assert "▁▃▆█" in capture.get()
    assert "0.250 → 0.750" in capture.get()


def test_notes_are_printed_as_they_are():
    target = console(width=20)
    PlainProgress(target).note("[bold] is not markup, and a long line is not broken")
    assert printed(target) == "[bold] is not markup, and a long line is not broken\n"


def test_the_live_panel_shows_every_figure():
    clock, target = Clock(), console(terminal=True, width=100)
    progress = LiveProgress(target, title="quickstart", clock=clock)
    progress.start()
    progress.note("held-out 0.380 before training")
    for version in range(150):
        clock.now = float(version)
        progress.update(snapshot(version, heldout=0.38 if version < 75 else 0.61, message="engine-1 fell behind"))
    progress.stop()
    progress.stop()
    text = printed(target)
    last = text[text.rindex("quickstart") :]
    for part in (
        "training",
        "149/300",
        "50%",
        "2:31 left",
        "mean 0.410",
        "0.380 → 0.610",
        "generated 1.2k/s (179k)",
        "trained 900/s (134k)",
        "0 ▃ 25%",
        "1 ▇ 75%",
        "bound 2",
        "24/32 groups in flight, 3 ready",
        "90% busy  decode",
        "95% busy  step",
        "engine-1 fell behind",
    ):
        assert part in last, part
    assert "held-out 0.380 before training" in text


def test_the_live_panel_is_drawn_at_most_twice_a_second():
    clock, target = Clock(), console(terminal=True)
    progress = LiveProgress(target, clock=clock)
    progress.start()
    for tick in range(1000):
        clock.now = tick * 0.01
        progress.update(snapshot(tick))
    assert printed(target).count("groups in flight") <= 10 / 0.5
    progress.stop()


def test_the_live_panel_keeps_its_width_whatever_it_shows():
    for width in (60, 80, 120):
        target = console(terminal=True, width=width)
        progress = LiveProgress(target, clock=Clock())
        many = {f"engine-{i}": ProcessActivity(phase="x" * 50, busy_fraction=2.0) for i in range(30)}
        shown = snapshot(5, processes=many, lag_histogram=dict.fromkeys(range(40), 1), lag_bound=None, reward=None)
        with target.capture() as capture:
            target.print(progress.render(shown, 5000.0))
        lines = capture.get().splitlines()
        assert len({len(line) for line in lines}) == 1
        assert len(lines) < 25
        assert "+ 20 more" in capture.get()


def test_an_empty_snapshot_can_be_shown():
    target = console(terminal=True)
    live, plain = LiveProgress(target, clock=Clock()), PlainProgress(target, clock=Clock())
    for progress in (live, plain, NoProgress()):
        progress.start()
        progress.update(RunSnapshot())
        progress.stop()
    assert "starting" in printed(target)


@pytest.mark.parametrize(
    ("kind", "terminal", "expected"),
    [
        ("auto", True, LiveProgress),
        ("auto", False, PlainProgress),
        ("live", True, LiveProgress),
        ("plain", True, PlainProgress),
        ("none", True, NoProgress),
    ],
)
def test_the_display_that_was_asked_for(kind: str, terminal: bool, expected: type, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert type(make_progress(kind, console(terminal=terminal))) is expected  # type: ignore[arg-type]


def test_live_without_a_terminal_says_why_it_is_plain():
    target = console()
    assert isinstance(make_progress("live", target), PlainProgress)
    assert "needs a terminal" in printed(target)


@given(st.floats(0.1, 1e4), st.floats(1.0, 60.0), st.integers(2, 200))
def test_a_steady_total_gives_its_rate_whatever_the_window(rate: float, window: float, ticks: int):
    sliding = SlidingRate(window)
    rates = [sliding.add(tick * 0.5, rate * tick * 0.5) for tick in range(ticks)]
    assert rates == [None, *[pytest.approx(rate)] * (ticks - 1)]


def test_a_rate_forgets_what_is_older_than_its_window():
    sliding = SlidingRate(10.0)
    rates = [sliding.add(float(second), 1000.0 * min(second, 50)) for second in range(101)]
    assert rates[-1] == 0.0
    assert sliding.add(101.0, 5.0) is None
    assert sliding.add(102.0, 8.0) == 3.0


def test_the_time_left_counts_training_only():
    rates = Rates()
    for second in range(60):
        rates.add(float(second), RunSnapshot(phase="evaluating", versions_total=100))
    for second in range(60, 71):
        rates.add(float(second), RunSnapshot(phase="training", version=2 * (second - 60), versions_total=100))
    assert rates.seconds_left == pytest.approx(80 / 2)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=50))
def test_a_sparkline_orders_its_values(values: list[float]):
    glyphs = Glyphs(ascii_only=False)
    line = glyphs.sparkline(values)
    heights = [glyphs.levels.index(mark) for mark in line]
    assert len(line) == len(values)
    for left, low in zip(values, heights, strict=True):
        for right, high in zip(values, heights, strict=True):
            assert not (left < right and low > high)
    if max(values) - min(values) > 1e-6:
        assert (min(heights), max(heights)) == (0, len(glyphs.levels) - 1)


@given(st.floats(-1, 2), st.integers(1, 60))
def test_a_bar_always_has_its_width(fraction: float, width: int):
    bar = Glyphs(ascii_only=True).bar(fraction, width, "green").plain
    assert len(bar) == width
    assert math.isclose(bar.count("#"), min(1, max(0, fraction)) * width, abs_tol=0.5001)
