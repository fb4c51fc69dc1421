"""The rule that chooses the number of engines: idle shares in, decisions out."""

import pytest

from headrace.pipeline.elastic import MOST, VERSIONS, Idle, Rule

STARVED, FULL, BOTH, NEITHER = Idle(0.9, 0.0), Idle(0.0, 0.9), Idle(0.9, 0.9), Idle(0.2, 0.2)


@pytest.mark.parametrize(
    ("idle", "wish"),
    [
        (STARVED, 1),
        (FULL, -1),
        (BOTH, 0),
        (NEITHER, 0),
        (Idle(0.51, 0.5), 1),
        (Idle(0.5, 0.51), -1),
        (Idle(0.5, 0.5), 0),
        (Idle(1.0, 1.0), 0),
        (Idle(0.0, 0.0), 0),
    ],
)
def test_the_side_that_waits_decides(idle: Idle, wish: int) -> None:
    assert idle.wish == wish


def decisions(rule: Rule, engines: int, *seen: Idle) -> list[int]:
    """Return every decision. The number of engines follows them."""
    found = []
    for idle in seen:
        found.append(rule.decide(engines, idle))
        engines += found[-1]
    return found


@pytest.mark.parametrize(
    ("engines", "seen", "expected"),
    [
        pytest.param(1, [STARVED] * 4, [0, 0, 0, 1], id="most of the last versions"),
        pytest.param(1, [STARVED] * 3, [0, 0, 0], id="too few versions"),
        pytest.param(1, [STARVED, NEITHER, STARVED, STARVED], [0, 0, 0, 1], id="one of them may differ"),
        pytest.param(1, [STARVED, STARVED, STARVED, NEITHER], [0, 0, 0, 0], id="not while the last one is balanced"),
        pytest.param(1, [STARVED, NEITHER, STARVED, BOTH] * 2, [0] * 8, id="half is not most"),
        pytest.param(1, [STARVED] * 8, [0, 0, 0, 1, 0, 0, 0, 1], id="again after as many versions"),
        pytest.param(4, [STARVED] * 8, [0] * 8, id="not above most"),
        pytest.param(3, [FULL] * 4, [0, 0, 0, -1], id="shrink"),
        pytest.param(1, [FULL] * 8, [0] * 8, id="not below least"),
        pytest.param(2, [BOTH] * 8, [0] * 8, id="engines do not help against a slow reward"),
        pytest.param(2, [NEITHER] * 8, [0] * 8, id="balanced"),
        pytest.param(1, [STARVED] * 4 + [FULL] * 7, [0, 0, 0, 1] + [0] * 7, id="back needs twice as many"),
        pytest.param(1, [STARVED] * 4 + [FULL] * 8, [0, 0, 0, 1] + [0] * 7 + [-1], id="and then it goes back"),
    ],
)
def test_decisions(engines: int, seen: list[Idle], expected: list[int]) -> None:
    assert decisions(Rule(1, 4), engines, *seen) == expected


def test_a_command_begins_the_observations_anew() -> None:
    rule = Rule(1, 4)
    assert decisions(rule, 1, *[STARVED] * (VERSIONS - 1)) == [0] * (VERSIONS - 1)
    rule.changed()
    assert decisions(rule, 2, STARVED) == [0]
    assert MOST < VERSIONS


@pytest.mark.parametrize("generation", [0.1, 0.4, 0.9, 1.1, 1.9, 2.1, 3.0, 3.9, 4.1, 7.0, 20.0])
def test_it_settles_and_does_not_oscillate(generation: float) -> None:
    """One engine needs `generation` for a version whose training takes 1. Engines share their work evenly."""
    for begin in (1, 4):
        rule, engines, sizes = Rule(1, 4), begin, [begin]
        for _ in range(200):
            needed = generation / engines
            period = max(needed, 1.0)
            engines += rule.decide(engines, Idle(1 - 1 / period, 1 - needed / period))
            sizes.append(engines)
        assert len(set(sizes[100:])) == 1
        assert sizes in (sorted(sizes), sorted(sizes, reverse=True)), "it goes one way"
