"""The two ledgers, of group attempts and of rollouts: every admitted item ends exactly once.

At every moment admitted = trained + dropped + failed + in flight. The ledgers are kept in memory, and counted from the
tables of the journal. There, balance is more than a sum: every ended item has a reason, rollouts agree with their
group, and every optimizer step trained as many groups and rollouts as the ledgers say. The balance holds at every
commit, so also for a live run.
"""

import copy
import sqlite3
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from headrace.buffer.checksums import CHECKED, sound
from headrace.errors import HeadraceError
from headrace.observe.summary import STATES, ledger_line

EndState = Literal["trained", "dropped", "failed"]
Table = Literal["groups", "rollouts"]
TABLES: tuple[Table, Table] = ("groups", "rollouts")
DISTINCT_REASONS = 100
"""So many different reasons are counted one by one for each end state. All others are counted as `OTHER_REASONS`."""
OTHER_REASONS = "other reasons"


class Counts(msgspec.Struct, kw_only=True):
    """The sums of one ledger, from memory or from the journal."""

    admitted: int = 0
    trained: int = 0
    dropped: int = 0
    failed: int = 0
    in_flight: int = 0
    reasons: dict[str, dict[str, int]] = msgspec.field(default_factory=lambda: {"dropped": {}, "failed": {}})
    """How often each reason occurred, by end state and reason."""

    def add_reason(self, state: str, reason: str, count: int = 1) -> None:
        """Count a reason by itself, or with the other reasons if there are too many different ones."""
        reasons = self.reasons[state]
        if reason not in reasons and len(reasons) >= DISTINCT_REASONS:
            reason = OTHER_REASONS
        reasons[reason] = reasons.get(reason, 0) + count

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


class Ledger:
    """One ledger. An item that ends twice, or was never admitted, raises `HeadraceError`."""

    def __init__(self, what: str, before: Counts | None = None) -> None:
        """`before` holds the counts of previous processes of the same run, with nothing in flight."""
        self.what = what
        self._counts = copy.deepcopy(before or Counts())
        if self._counts.in_flight:
            raise HeadraceError(f"the ledger of {what} cannot go on from {self._counts.in_flight} items in flight")
        self.in_flight: set[int | str] = set()

    def admit(self, item: int | str) -> None:
        """Add an item, in flight."""
        if item in self.in_flight:
            raise HeadraceError(f"{self.what}: {item} was admitted twice")
        self.in_flight.add(item)
        self._counts.admitted += 1

    def end(self, item: int | str, state: EndState, reason: str = "") -> None:
        """Move an item from in flight to its end state. Every state but `trained` needs a reason."""
        if item not in self.in_flight:
            raise HeadraceError(f"{self.what}: {item} cannot become {state}, it is not in flight")
        if state != "trained":
            if not reason:
                raise HeadraceError(f"{self.what}: {item} was {state} without a reason")
            self._counts.add_reason(state, reason)
        self.in_flight.remove(item)
        setattr(self._counts, state, getattr(self._counts, state) + 1)

    def counts(self) -> Counts:
        """Return the present sums."""
        return msgspec.structs.replace(copy.deepcopy(self._counts), in_flight=len(self.in_flight))

    def check(self) -> None:
        """Raise `HeadraceError` if the ledger does not balance."""
        self.counts().check(self.what)


class Ledgers:
    """The ledger of groups and the ledger of rollouts of one policy, which change together."""

    def __init__(self, groups: Counts | None = None, rollouts: Counts | None = None) -> None:
        self.groups = Ledger("groups", groups)
        self.rollouts = Ledger("rollouts", rollouts)
        self._members: dict[int, list[str]] = {}

    def admitted(self, group_id: int, rollout_ids: Iterable[str]) -> None:
        """Record that a group and its rollouts start."""
        self.groups.admit(group_id)
        self._members[group_id] = list(rollout_ids)
        for rollout_id in self._members[group_id]:
            self.rollouts.admit(rollout_id)

    def group_ended(self, group_id: int, state: EndState, reason: str = "") -> None:
        """Record that a group ends, and with it all its rollouts that have not ended before."""
        self.groups.end(group_id, state, reason)
        for rollout_id in self._members.pop(group_id):
            if rollout_id in self.rollouts.in_flight:
                self.rollouts.end(rollout_id, state, reason)

    def check(self) -> None:
        """Raise `HeadraceError` if one of the ledgers does not balance."""
        self.groups.check()
        self.rollouts.check()

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return `{"groups": ..., "rollouts": ...}` for summaries. The dict equals the journal's counts."""
        return {table: msgspec.structs.asdict(getattr(self, table).counts()) for table in TABLES}


def count_ledger(db: sqlite3.Connection, table: Table, policy: str | None = None) -> Counts:
    """Count the ledger of one table, of one policy or of all. The most frequent reasons come first.

    Beyond `DISTINCT_REASONS`, the less frequent reasons are counted together.
    """
    of_policy, given = "TRUE", () if policy is None else (policy,)
    if policy is not None:
        of_policy = "policy = ?" if table == "groups" else "group_id IN (SELECT id FROM groups WHERE policy = ?)"
    # The sums take one pass; GROUP BY would first sort a million rows.
    sums = ", ".join(f"COALESCE(SUM(state = '{state}'), 0)" for state in STATES)
    found = db.execute(f"SELECT COUNT(*), {sums} FROM {table} WHERE {of_policy}", given).fetchone()
    counts = Counts(**dict(zip(("admitted", *STATES), found, strict=True)))
    why = f"""
        SELECT state, reason, COUNT(*) AS n FROM {table} WHERE state IN ('dropped', 'failed') AND {of_policy}
        GROUP BY state, reason ORDER BY n DESC, reason
    """
    for state, reason, count in db.execute(why, given):
        counts.add_reason(state, reason, count)
    return counts


def imbalances(db: sqlite3.Connection) -> list[str]:
    """Return every contradiction within the ledgers, between them, or between them and the steps, one line each."""
    found = []
    for checked in CHECKED:
        found += _line(
            db, f"rows of {checked} that are damaged", f"SELECT rowid FROM {checked} WHERE NOT {sound(db, checked)}"
        )
    for table in TABLES:
        counts = msgspec.structs.asdict(count_ledger(db, table))
        if counts["admitted"] != sum(counts[state] for state in STATES):
            found.append(f"{table}: {ledger_line(counts)}")
        silent = f"SELECT id FROM {table} WHERE state IN ('dropped', 'failed') AND reason = ''"
        found += _line(db, f"{table} ended without a reason", silent)
        unlike = f"SELECT id FROM {table} WHERE (state = 'trained') <> (step IS NOT NULL)"
        found += _line(db, f"{table} with a step but not trained, or the reverse", unlike)
    joined = "SELECT rollouts.id FROM rollouts LEFT JOIN groups ON groups.id = rollouts.group_id"
    found += _line(db, "rollouts without a group", f"{joined} WHERE groups.id IS NULL")
    # A group ends with all its rollouts. Some may have been left out before, of a group that continued or was trained.
    left_out = "rollouts.state = 'failed' OR rollouts.reason IN ('straggler', 'overlong', 'low_score')"
    differ = f"NOT ({left_out}) AND (rollouts.state <> groups.state OR rollouts.step IS NOT groups.step)"
    found += _line(db, "rollouts that disagree with their group", f"{joined} WHERE {differ}")
    for table in TABLES:
        # A step is written after its groups, so the groups that it counts must be there.
        trained = f"SELECT step, COUNT(*) AS n FROM {table} WHERE state = 'trained' GROUP BY step"
        query = f"""
            SELECT steps.step AS id FROM steps LEFT JOIN ({trained}) AS ledger ON ledger.step = steps.step
            WHERE steps.objective = 'policy' AND steps.{table} <> COALESCE(ledger.n, 0) ORDER BY id
        """
        found += _line(db, f"steps that trained other {table} than the ledger says", query)
    return found


def _line(db: sqlite3.Connection, what: str, query: str) -> list[str]:
    ids = [str(found) for (found,) in db.execute(query)]
    more = ", ..." if len(ids) > 3 else ""
    return [f"{len(ids):,} {what}: {', '.join(ids[:3])}{more}"] if ids else []
