"""How long launches are: by hand for known times, and within their bounds for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.embedded.device.pace import LAUNCH_SECONDS, LONGEST_TURN, NOTICE_SECONDS, SLACK, STEPS, Pace

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
    assert LAUNCH_SECONDS == 2e-3 and SLACK == 1.5
    assert paced(4.6e-3, 1e-3).steps == 1, "one step is enough for a host this quick"
    assert paced(1.5e-3, 1e-3).steps == 2, "2 ms in steps of 1.5"
    assert paced(5e-4, 1e-4).steps == 4, "2 ms in steps of 0.5, however quick the host is"
    assert paced(1.5e-3, 5.9e-3).steps == 6, "half as much again as the host's 5.9 ms, in steps of 1.5"
    assert paced(1e-4, 5e-3).steps == STEPS


def test_spare_time_by_hand() -> None:
    assert paced(4.6e-3, 1.6e-3).spare(1) == pytest.approx(4.6e-3 - 2.4e-3), "the host's turn is kept, with slack"
    assert paced(4.6e-3, 1e-4).spare(2) == pytest.approx(9.2e-3 - 2e-3)
    assert paced(1.5e-3, 1e-3).spare(1) == 0
    assert Pace().spare(8) == 0, "nobody knows yet"


def test_a_hurry_is_one_step_at_a_time_and_ends() -> None:
    pace = paced(1.5e-3, 5.9e-3)
    pace.hurry("soon")
    assert pace.steps == 1
    pace.hurry("now")
    assert pace.steps == 1
    pace.hurry("none")
    assert pace.steps == 6


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def delivered(pace: Pace, clock: Clock, proof: float) -> None:
    """Weights that arrived, were proved and installed."""
    pace.hurry("soon")
    clock.now += proof
    pace.hurry("now")
    pace.hurry("none")


def held_for(pace: Pace, clock: Clock) -> float:
    """How long no step is begun from now on, in steps of 0.1 ms."""
    began = clock.now
    while pace.held:
        clock.now += 1e-4
    return clock.now - began


def test_no_step_is_begun_before_weights_whose_proof_takes_less_than_one() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.stepped(5e-3)
    pace.hurry("soon")
    assert not pace.held, "nobody knows yet how long a proof takes"
    pace.hurry("none")
    delivered(pace, clock, 2e-3)
    assert not pace.held
    pace.hurry("soon")
    assert held_for(pace, clock) == pytest.approx(5e-3, abs=2e-4), (
        "a proof that takes longer than one is not waited for"
    )


def test_steps_go_on_while_a_longer_proof_is_made() -> None:
    clock = Clock()
    pace = Pace(clock)
    delivered(pace, clock, 2e-3)
    pace.hurry("soon")
    assert not pace.held, "nobody knows yet how long a step takes"
    pace.stepped(5e-3)
    delivered(pace, clock, 5.1e-3)
    pace.hurry("soon")
    assert not pace.held


def test_proved_weights_are_waited_for_until_they_should_be_installed() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.hurry("now")
    assert held_for(pace, clock) == pytest.approx(NOTICE_SECONDS, abs=2e-4)
    assert pace.steps == 1
    pace.hurry("now")
    pace.hurry("none")
    assert not pace.held


def test_proved_weights_are_waited_for_a_step_at_most() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.stepped(NOTICE_SECONDS / 4)
    pace.hurry("now")
    assert held_for(pace, clock) == pytest.approx(NOTICE_SECONDS / 4, abs=2e-4)


@given(st.floats(1e-4, 0.1), st.floats(1e-6, 0.1), st.floats(1e-6, 0.1))
def test_steps_wait_for_a_delivery_no_longer_than_one_of_them_takes(step: float, known: float, proof: float) -> None:
    """From arrival to installation, if the proof takes as long as the last one or not, and nobody ever installs."""
    clock = Clock()
    pace = Pace(clock)
    pace.stepped(step)
    delivered(pace, clock, known)
    pace.hurry("soon")
    clock.now += proof
    waited = proof if pace.held else 0.0
    assert waited <= step
    pace.hurry("now")
    waited += held_for(pace, clock)
    assert waited <= step + 1.1e-4


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


def test_steps_that_become_slower_or_faster_are_followed() -> None:
    pace = paced(1e-3, 1e-4)
    assert pace.steps == 2, "2 ms in steps of 1"
    for _ in range(100):
        pace.stepped(4e-4)
    assert pace.steps == 5, "2 ms in steps of 0.4"
    for _ in range(100):
        pace.stepped(4e-3)
    assert pace.steps == 1, "one step of 4 ms is longer than 2"


def test_a_host_that_becomes_slower_or_quicker_is_followed() -> None:
    pace = paced(1e-3, 1e-4)
    for _ in range(100):
        pace.turned(3e-3)
    assert pace.steps == 5, "half as much again as the host's 3 ms, in steps of 1"
    for _ in range(100):
        pace.turned(1e-4)
    assert pace.steps == 2, "2 ms in steps of 1"


def test_one_measurement_counts_for_a_tenth() -> None:
    pace = paced(1e-3, 1e-4)
    pace.stepped(3e-3)
    assert pace.steps == 2, "2 ms in steps of 1.2: a single slow step does not change a launch"
    for _ in range(6):
        pace.stepped(3e-3)
    assert pace.steps == 1, "1 + 2 * (1 - 0.9 ** 7) is above 2"


def test_steps_that_cover_prompts_by_hand() -> None:
    pace = paced(4e-3, 1e-3)
    assert pace.cover == STEPS, "nobody knows yet how long prompts take"
    pace.enqueued_prompts(15e-3)
    assert pace.cover == 4
    pace.hurry("now")
    assert pace.cover == 1
    pace.hurry("none")
    for _ in range(100):
        pace.enqueued_prompts(1e-4)
    assert pace.cover == 1
    assert pace.steps == 1, "prompts are no part of a turn"
