"""The two ledgers in memory: every admitted group attempt, and every rollout, ends exactly once.

At every moment admitted = trained + dropped + failed + in flight. `Journal.counts` computes the same counts from the
journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args

import msgspec

from headrace.errors import HeadraceError
from headrace.types import POLICY

EndState = Literal["trained", "dropped", "failed"]
END_STATES: tuple[EndState, ...] = get_args(EndState)


class Counts(msgspec.Struct, kw_only=True):
    """The sums of one ledger, from memory or from the journal."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    in_flight: int = 0
    reasons: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: {"dropped": {}, "failed": {}})
    """How often each reason occurred, by end state and reason."""

    def check(self, what: str) -> None:
        """Raise `HeadraceError` unless every admitted item is counted exactly once."""
        ended = self.trained + self.dropped + self.failed
        if self.admitted != ended + self.in_flight:
            raise HeadraceError(
                f"the ledger of {what} does not balance: {self.admitted} admitted, but {self.trained} trained + "
                f"{self.dropped} dropped + {self.failed} failed + {self.in_flight} in flight"
            )
        for state in ("dropped", "failed"):
            if sum(self.reasons[state].values()) != getattr(self, state):
                raise HeadraceError(f"the ledger of {what} has {state} items without a reason")

    def as_dict(self) -> dict[str, Any]:
        """Return the sums as a dict, for summaries."""
        return msgspec.structs.asdict(self)


class Ledger:
    """One ledger. An item that ends twice, or was never admitted, raises `HeadraceError`."""

    def __init__(self, what: str, before: Counts | None = None) -> None:
        """`before` holds the counts of previous processes of the same run, with nothing in flight."""
        before = before or Counts()
        if before.in_flight:
            raise HeadraceError(f"the ledger of {what} cannot go on from {before.in_flight} items in flight")
        self.what = what
        self._admitted = before.admitted
        self._ended: dict[EndState, int] = {state: getattr(before, state) for state in END_STATES}
        self._reasons = {state: dict(reasons) for state, reasons in before.reasons.items()}
        self._in_flight: set[int | str] = set()

    def admit(self, item: int | str) -> None:
        """Add an item, in flight."""
        if item in self._in_flight:
            raise HeadraceError(f"{self.what}: {item} was admitted twice")
        self._in_flight.add(item)
        self._admitted += 1

    def end(self, item: int | str, state: EndState, reason: str = "") -> None:
        """Move an item from in flight to its end state. Every state but `trained` needs a reason."""
        if item not in self._in_flight:
            raise HeadraceError(f"{self.what}: {item} cannot become {state}, it is not in flight")
        if state != "trained":
            if not reason:
                raise HeadraceError(f"{self.what}: {item} was {state} without a reason")
            self._reasons[state][reason] = self._reasons[state].get(reason, 0) + 1
        self._in_flight.remove(item)
        self._ended[state] += 1

    def holds(self, item: int | str) -> bool:
        """Return whether the item is in flight."""
        return item in self._in_flight

    def counts(self) -> Counts:
        """Return the present sums."""
        reasons = {state: dict(by_reason) for state, by_reason in self._reasons.items()}
        return Counts(admitted=self._admitted, **self._ended, in_flight=len(self._in_flight), reasons=reasons)

    def check(self) -> None:
        """Raise `HeadraceError` if the ledger does not balance."""
        self.counts().check(self.what)


class Ledgers:
    """The ledger of groups and the ledger of rollouts of one policy, which change together."""

    def __init__(self, groups: Counts | None = None, rollouts: Counts | None = None, *, policy: str = POLICY) -> None:
        self.policy = policy
        """The policy that the groups train."""
        self.groups = Ledger("groups", groups)
        self.rollouts = Ledger("rollouts", rollouts)
        self._members: dict[int, list[str]] = {}

    def admitted(self, group_id: int, rollout_ids: Iterable[str]) -> None:
        """Record that a group and its rollouts start."""
        self.groups.admit(group_id)
        self._members[group_id] = list(rollout_ids)
        for rollout_id in self._members[group_id]:
            self.rollouts.admit(rollout_id)

    def rollout_failed(self, rollout_id: str, reason: str) -> None:
        """Record that a rollout failed. Its group continues without it."""
        self.rollouts.end(rollout_id, "failed", reason)

    def rollout_dropped(self, rollout_id: str, reason: str) -> None:
        """Record that Headrace decided not to train a rollout. Its group continues without it."""
        self.rollouts.end(rollout_id, "dropped", reason)

    def group_ended(self, group_id: int, state: EndState, reason: str = "") -> None:
        """Record that a group ends, and with it all its rollouts that have not ended before."""
        self.groups.end(group_id, state, reason)
        for rollout_id in self._members.pop(group_id):
            if self.rollouts.holds(rollout_id):
                self.rollouts.end(rollout_id, state, reason)

    def check(self) -> None:
        """Raise `HeadraceError` if one of the ledgers does not balance."""
        self.groups.check()
        self.rollouts.check()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return `{"groups": ..., "rollouts": ...}` for summaries. The dict equals the journal's counts."""
        return {"groups": self.groups.counts().as_dict(), "rollouts": self.rollouts.counts().as_dict()}
