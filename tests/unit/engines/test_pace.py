"""How long launches are: by hand for known times, and within their bounds for any."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.embedded.device.pace import LAUNCH_SECONDS, LONGEST_TURN, SLACK, STEPS, Pace

SECONDS = st.floats(0.0, 10.0)


def paced(step: float, turn: float) -> Pace:
    pace = Pace()
    pace.stepped(step)
    pace.turned(turn)
    return pace


def test_launches_are_long_until_times_are_known() -> None:
    pace = Pace()
    assert pace.steps == STEPS
    pace.stepped(1.0)
    assert pace.steps == STEPS
    pace.turned(1e-3)
    assert pace.steps == 1


def test_without_a_device_clock_launches_stay_long() -> None:
    assert paced(0.0, 1.0).steps == STEPS


def test_steps_by_hand() -> None:
    assert LAUNCH_SECONDS == 4e-3 and SLACK == 2.0
    assert paced(4.6e-3, 1e-3).steps == 1, "one step is enough for a host this quick"
    assert paced(1.5e-3, 1e-3).steps == 3, "4 ms in steps of 1.5"
    assert paced(1.5e-3, 5e-3).steps == 7, "twice the host's 5 ms in steps of 1.5"
    assert paced(1e-4, 5e-3).steps == STEPS


def test_a_hurry_is_one_step_at_a_time_and_ends() -> None:
    pace = paced(1.5e-3, 5e-3)
    pace.haste = "soon"
    assert pace.steps == 1
    pace.haste = "now"
    assert pace.steps == 1
    pace.haste = "none"
    assert pace.steps == 7


def test_one_launch_may_be_of_one_step() -> None:
    pace = paced(1.5e-3, 5e-3)
    pace.single = True
    assert pace.steps == 1


def test_a_turn_that_captured_a_step_is_soon_forgotten() -> None:
    pace = paced(4.6e-3, 5.0)
    for _ in range(40):
        pace.turned(1e-3)
    assert pace.steps == 1


@given(st.lists(st.tuples(SECONDS, SECONDS), max_size=50))
def test_a_launch_covers_the_host_or_is_as_long_as_may_be(times: list[tuple[float, float]]) -> None:
    pace = Pace()
    for step, turn in times:
        pace.stepped(step)
        pace.turned(turn)
    assert 1 <= pace.steps <= STEPS


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_the_device_never_runs_dry_unless_at_the_bound(step: float, turn: float) -> None:
    steps = paced(step, turn).steps
    assert steps == STEPS or steps * step >= SLACK * min(turn, LONGEST_TURN) * (1 - 1e-12)


@given(st.floats(1e-6, 1.0), st.floats(0.0, 1.0))
def test_no_step_more_than_needed(step: float, turn: float) -> None:
    steps = paced(step, turn).steps
    assert steps == 1 or (steps - 1) * step < max(LAUNCH_SECONDS, SLACK * turn)


def test_measurements_are_followed() -> None:
    pace = paced(1e-3, 1e-4)
    assert pace.steps == 4
    for _ in range(100):
        pace.stepped(4e-3)
    assert pace.steps == 2, "they come close to 4 ms and never quite reach it"
