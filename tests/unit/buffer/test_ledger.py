from __future__ import annotations

import msgspec
import pytest

from headrace.buffer.ledger import Counts, Ledger, Ledgers
from headrace.errors import HeadraceError


def test_both_ledgers_follow_groups_to_their_end() -> None:
    ledgers = Ledgers()
    for group_id in range(4):
        ledgers.admitted(group_id, [f"{group_id}/0", f"{group_id}/1"])
    ledgers.rollouts.end("0/1", "failed", "timeout")
    ledgers.group_ended(0, "trained")
    ledgers.group_ended(1, "dropped", "stale")
    ledgers.rollouts.end("2/0", "failed", "reward raised")
    ledgers.rollouts.end("2/1", "failed", "timeout")
    ledgers.group_ended(2, "failed", "no rollout left")
    ledgers.check()
    assert ledgers.as_dict() == {
        "groups": {
            "admitted": 4,
            "trained": 1,
            "dropped": 1,
            "failed": 1,
            "in_flight": 1,
            "reasons": {"dropped": {"stale": 1}, "failed": {"no rollout left": 1}},
        },
        "rollouts": {
            "admitted": 8,
            "trained": 1,
            "dropped": 2,
            "failed": 3,
            "in_flight": 2,
            "reasons": {"dropped": {"stale": 2}, "failed": {"timeout": 2, "reward raised": 1}},
        },
    }


def test_nothing_moves_twice() -> None:
    ledgers = Ledgers()
    ledgers.admitted(0, ["0/0"])
    with pytest.raises(HeadraceError, match="admitted twice"):
        ledgers.admitted(0, ["0/0"])
    ledgers.rollouts.end("0/0", "failed", "timeout")
    with pytest.raises(HeadraceError, match="rollouts: 0/0 cannot become failed"):
        ledgers.rollouts.end("0/0", "failed", "timeout")
    ledgers.group_ended(0, "trained")
    with pytest.raises(HeadraceError, match="groups: 0 cannot become dropped"):
        ledgers.group_ended(0, "dropped", "stale")
    with pytest.raises(HeadraceError, match="groups: 7 cannot become trained"):
        ledgers.group_ended(7, "trained")


def test_dropping_needs_a_reason() -> None:
    ledger = Ledger("groups")
    ledger.admit(0)
    with pytest.raises(HeadraceError, match="without a reason"):
        ledger.end(0, "dropped")
    ledger.check()


def test_an_unbalanced_ledger_is_noticed() -> None:
    Counts(admitted=3, trained=2, in_flight=1).check("groups")
    with pytest.raises(HeadraceError, match="groups does not balance: 3 admitted, but 2 trained"):
        Counts(admitted=3, trained=2).check("groups")
    with pytest.raises(HeadraceError, match="dropped items without a reason"):
        Counts(admitted=1, dropped=1).check("groups")


class Losing(Ledger):
    """A ledger that has lost what is in flight."""

    def counts(self) -> Counts:
        return msgspec.structs.replace(super().counts(), in_flight=0)


def test_a_ledger_checks_its_own_counts() -> None:
    ledger = Losing("groups")
    ledger.check()
    ledger.admit(0)
    with pytest.raises(HeadraceError, match="does not balance"):
        ledger.check()


def test_a_ledger_goes_on_from_an_earlier_run() -> None:
    before = Counts(admitted=5, trained=4, dropped=1, reasons={"dropped": {"interrupted": 1}, "failed": {}})
    ledgers = Ledgers(before, None)
    ledgers.admitted(5, [])
    ledgers.group_ended(5, "dropped", "interrupted")
    counts = ledgers.groups.counts()
    assert (counts.admitted, counts.trained, counts.dropped) == (6, 4, 2)
    assert counts.reasons["dropped"] == {"interrupted": 2}
    assert before.reasons["dropped"] == {"interrupted": 1}
    with pytest.raises(HeadraceError, match="in flight"):
        Ledgers(Counts(admitted=1, in_flight=1))
