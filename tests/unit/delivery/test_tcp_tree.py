"""The tree of engines, event by event: a bounded fan-out, parents that have the version, and nobody waits in vain."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from headrace.delivery.transports.tcp_server import SILENCE, TRAINER, Tree


def test_seven_engines_by_hand() -> None:
    tree = Tree(fan_out=2)
    assert [tree.parent_of(name, 0.0) for name in "abcd"] == [TRAINER, TRAINER, None, None]
    tree.offered("b", "at-b")
    assert [tree.parent_of(name, 1.0) for name in "cde"] == ["at-b", "at-b", None]
    tree.offered("a", "at-a")
    assert [tree.parent_of(name, 2.0) for name in "efg"] == ["at-a", "at-a", None]
    tree.offered("c", "at-c")
    assert tree.parent_of("g", 3.0) == "at-c"
    assert tree.parent_of("g", 3.0) == "at-c", "the same answer to the same question"
    tree.lost("at-c")
    assert tree.parent_of("g", 3.0) == TRAINER


def test_who_says_nothing_is_not_waited_for() -> None:
    tree = Tree(fan_out=1)
    assert tree.parent_of("a", 0.0) == TRAINER
    assert tree.parent_of("b", SILENCE - 1) is None
    assert tree.parent_of("a", SILENCE - 1) == TRAINER, "a sign of life"
    assert tree.parent_of("b", SILENCE + 1) is None
    assert tree.parent_of("b", 2 * SILENCE) == TRAINER


EVENTS = st.lists(st.tuples(st.sampled_from(["ask", "arrive", "die", "lose"]), st.integers(0, 9)), max_size=80)


@given(EVENTS, st.integers(1, 3))
def test_any_order_of_events(events: list[tuple[str, int]], fan_out: int) -> None:
    tree, now = Tree(fan_out), 0.0
    parents: dict[int, str] = {}
    offers: set[str] = set()
    dead: set[int] = set()
    disturbed = False
    for event, engine in events:
        now += 0.01
        if engine in dead:
            continue
        if event == "die":
            dead.add(engine)
        elif event == "arrive" and engine in parents:
            tree.offered(str(engine), f"at-{engine}")
            offers.add(f"at-{engine}")
        elif event == "lose" and parents.get(engine, TRAINER) != TRAINER:
            disturbed = True
            tree.lost(parents[engine])
            offers.discard(parents[engine])
            assert tree.parent_of(str(engine), now) == TRAINER
            parents[engine] = TRAINER
        elif event == "ask":
            found = tree.parent_of(str(engine), now)
            if found is not None:
                assert found == TRAINER or found in offers or found == parents.get(engine)
                assert found != f"at-{engine}", "nobody fetches from itself"
                parents[engine] = found
        counts = [list(parents.values()).count(at) for at in (TRAINER, *offers)]
        assert max(counts[1:], default=0) <= fan_out
        arrived = {int(at.removeprefix("at-")) for at in offers}
        if not disturbed and set(parents) - arrived:
            assert counts[0] <= fan_out, "while anybody may yet become a parent"
    # Time passes, and everybody who lives has somebody to ask.
    now += 2 * SILENCE
    for engine in range(10):
        assert tree.parent_of(str(engine), now) is not None
        now += 2 * SILENCE
