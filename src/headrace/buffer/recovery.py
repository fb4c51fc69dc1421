"""Recovery of the journal of a dead run.

Steps that the run trained after its checkpoint can be trained again, groups in flight continue, and everything else is
closed. Afterwards every group is trained up to `Recovered.resume_step`, or in flight and in `Recovered.unfinished`, or
ended: the ledgers balance, and no group is in two places.
"""

from typing import Any

import msgspec
import numpy as np

from headrace.buffer.checksums import damaged_rows
from headrace.buffer.ledger import Counts, count_ledger
from headrace.buffer.segments import DAMAGED, RecordLocation, segment_path
from headrace.buffer.store import COMMIT_SECONDS, Store
from headrace.errors import DataError
from headrace.run_dir import set_aside
from headrace.types import STEP_SECONDS, Group, Prompt, Trace, held_back_seconds, republished_among


class UnfinishedGroup(msgspec.Struct, kw_only=True):
    """A group that was in flight when the run died, with everything that the journal knows about it."""

    group: Group
    """The group as it was admitted, with its rollouts if it was complete. Its prompt has only its id."""
    members: list[str]
    """The ids of the rollouts that have not failed."""
    partial: dict[str, list[Trace]] = {}
    """The traces so far of each rollout, by rollout id, if the group was not complete. A rollout without saved tokens
    is missing here."""

    @property
    def complete(self) -> bool:
        """Whether all rollouts had ended, so that nothing is left to sample."""
        return bool(self.group.rollouts)


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """Where the previous processes of the run stopped, for one policy."""

    next_group: int
    """The next free group id. Ids are unique in the run, whatever policy a group trains."""
    last_version: int
    """The highest version id ever published, or -1 if none. The next version takes a higher id."""
    resume_step: int
    """The last optimizer step that can be trained again from the journal and that ends a version."""
    republished: list[int] = []
    """The version ids whose weights had another id before. The next free id is among them if the weights that the
    resumed run publishes first had an id already."""
    unfinished: list[UnfinishedGroup] = []
    """The groups that were in flight, oldest first."""
    overtakers: list[int] = []
    """The groups trained up to `resume_step` that are younger than the oldest group in `unfinished`."""
    unseen_tokens: int = 0
    """The approximate number of tokens that were sampled but not written before the run died."""
    groups: Counts
    """The counts of the ledger, without the groups in `unfinished`."""
    rollouts: Counts
    drawn: int | dict[str, int] = 0
    """The position in the order of prompts. With several tasks it has several numbers, by name."""
    temperature: float | None = None
    """The sampling temperature of tokens that were recorded without one."""
    outcomes: list[tuple[int, str, int, int]] = []
    """The outcome of each scored group, oldest first: (group id, prompt id, number of right answers, number of
    answers). An answer is right if its reward is at least 1."""
    damage: list[str] = []
    """One line for each table with damaged rows, and for each segment that is missing or damaged."""


Lost = dict[str, set[int]]
"""The groups whose tokens cannot be read, by segment."""
DAMAGED_ROW = "its row in the journal is damaged"
NAMED = 8
"""The number of groups that a line about damage names."""
OF_POLICY = "group_id IN (SELECT id FROM groups WHERE policy = ?)"
"""The SQL condition for the rollouts of groups that train a policy."""


def recover(store: Store, step: int, now: float, publish_every: int, *, policy: str, outcomes: bool) -> Recovered:
    """See `Journal.recover`. Must be called inside a transaction."""
    damage = _fail_damaged_rows(store, step, now)
    lost = _forget_lost_tokens(store, step)
    resume_step = _resume_step(store, policy, step, publish_every)
    _reopen(store, policy, resume_step, now)
    if store.segments is None:
        _close(store, policy, now)
    in_flight = "SELECT id, prompt, version, policy FROM groups WHERE state = 'in_flight' AND policy = ? ORDER BY id"
    left = [_left_group(store, lost, *row) for row in store.db.execute(in_flight, (policy,)).fetchall()]
    younger = "SELECT id FROM groups WHERE state = 'trained' AND policy = ? AND id > ?"
    overtakers = [found for (found,) in store.db.execute(younger, (policy, left[0].group.id))] if left else []
    versions = store.db.execute("SELECT id, step FROM versions WHERE policy = ? ORDER BY id", (policy,)).fetchall()
    last_version = versions[-1][0] if versions else -1
    return Recovered(
        next_group=_scalar(store, "SELECT COALESCE(MAX(id) + 1, 0) FROM groups"),
        last_version=last_version,
        resume_step=resume_step,
        republished=republished_among([*versions, (last_version + 1, resume_step)]),
        unfinished=left,
        overtakers=overtakers,
        unseen_tokens=_unseen_tokens(store),
        groups=_without_flight(count_ledger(store.db, "groups", policy)),
        rollouts=_without_flight(count_ledger(store.db, "rollouts", policy)),
        drawn=_drawn(store),
        temperature=store.db.execute("SELECT MAX(CAST(value AS REAL)) FROM meta WHERE key = 'temperature'").fetchone()[
            0
        ],
        outcomes=_outcomes(store, policy) if outcomes else [],
        damage=damage + [_describe_damage(store, segment, groups) for segment, groups in sorted(lost.items())],
    )


def _drawn(store: Store) -> int | dict[str, int]:
    """See `Recovered.drawn`. If the position is lost, it is taken to be the number of groups."""
    sql = "SELECT COALESCE((SELECT value FROM meta WHERE key = 'drawn'), MAX(id) + 1, 0) FROM groups"
    return msgspec.json.decode(str(store.db.execute(sql).fetchone()[0]), type=int | dict[str, int])


def _outcomes(store: Store, policy: str) -> list[tuple[int, str, int, int]]:
    """See `Recovered.outcomes`. Groups in flight are left out: they are counted when they end in the resumed run."""
    sql = """
        SELECT groups.id, groups.prompt, SUM(reward >= 1), COUNT(reward) FROM rollouts
        JOIN groups ON groups.id = group_id
        WHERE reward IS NOT NULL AND groups.state <> 'in_flight' AND groups.policy = ?
        GROUP BY groups.id ORDER BY groups.id
    """
    return store.db.execute(sql, (policy,)).fetchall()


def _resume_step(store: Store, policy: str, step: int, publish_every: int) -> int:
    """Return the last step that ends a version and up to which all tokens after `step` are in the journal."""
    resume_step = step
    sql = """
        SELECT steps.step, steps.rollouts = COUNT(rollouts.id) AND COUNT(rollouts.id) = COUNT(rollouts.segment)
        FROM steps LEFT JOIN groups
        ON groups.step = steps.step AND groups.policy = steps.policy AND groups.state = 'trained'
        LEFT JOIN rollouts ON rollouts.group_id = groups.id AND rollouts.state = 'trained'
        WHERE steps.step > ? AND steps.policy = ? AND steps.objective = 'policy'
        GROUP BY steps.step ORDER BY steps.step
    """
    for found, whole in store.db.execute(sql, (step, policy)).fetchall():
        if found != resume_step + 1 or not whole:
            break
        resume_step = found
    return max(step, resume_step - resume_step % publish_every)


def _reopen(store: Store, policy: str, resume_step: int, now: float) -> None:
    """Put the groups that later steps trained back in flight. A group whose tokens are gone is dropped instead."""
    after = (resume_step, policy)
    gone = f"SELECT group_id FROM rollouts WHERE step > ? AND {OF_POLICY} AND state = 'trained' AND segment IS NULL"
    lost = f"state = 'dropped', reason = 'rolled back', step = NULL, ended = COALESCE(ended, {float(now)!r})"
    for table, group in (("groups", "id"), ("rollouts", "group_id")):
        store.write(f"UPDATE {table} SET {lost} WHERE step > ? AND {group} IN ({gone})", resume_step, *after)
    again = "state = 'in_flight', step = NULL"
    store.write(f"UPDATE groups SET {again}, ended = NULL WHERE step > ? AND policy = ?", *after)
    store.write(f"UPDATE rollouts SET {again} WHERE step > ? AND {OF_POLICY}", *after)
    store.write("DELETE FROM steps WHERE step > ? AND policy = ?", *after)


def _close(store: Store, policy: str, now: float) -> None:
    for table, of_policy in (("groups", "policy = ?"), ("rollouts", OF_POLICY)):
        sql = f"UPDATE {table} SET state = 'dropped', reason = 'interrupted', ended = COALESCE(ended, ?)"
        store.write(f"{sql} WHERE state = 'in_flight' AND {of_policy}", now, policy)
    store.write(f"DELETE FROM partials WHERE rollout IN (SELECT id FROM rollouts WHERE {OF_POLICY})", policy)


def _left_group(store: Store, lost: Lost, group_id: int, prompt: str, version: int, policy: str) -> UnfinishedGroup:
    columns = "id, state, ended IS NOT NULL AND segment IS NOT NULL, segment, offset, length"
    rows = store.db.execute(f"SELECT {columns} FROM rollouts WHERE group_id = ?", (group_id,)).fetchall()
    group = Group(id=group_id, prompt=Prompt(id=prompt), version=version, policy=policy)
    if rows and all(ended for _, _, ended, *_ in rows):
        # The group will be judged again, and the filters then drop the same rollouts again.
        sql = "UPDATE rollouts SET state = 'in_flight', reason = '' WHERE group_id = ? AND state = 'dropped'"
        store.write(sql, group_id)
        group.rollouts = sorted((store.read(*where) for *_, where in _located(rows)), key=lambda one: one.index)
        return UnfinishedGroup(group=group, members=[member for member, state, *_ in rows if state != "failed"])
    left = UnfinishedGroup(group=group, members=[rollout_id for rollout_id, *_ in rows])
    # Some rollouts may be recorded as ended already. They are judged again, together with the others.
    for rollout_id, where in _located(rows):
        ended = store.read(*where)
        store.add_partial(ended, where)
        if ended.traces:
            left.partial[rollout_id] = ended.traces
    store.write(
        "UPDATE rollouts SET state = 'in_flight', reason = '', ending = NULL, reward = NULL, tokens = 0,"
        " sampled_tokens = 0, oldest_version = NULL, newest_version = NULL, ended = NULL, segment = NULL,"
        " offset = NULL, length = NULL WHERE group_id = ?",
        group_id,
    )
    for rollout_id in left.members:
        if rollout_id not in left.partial and (traces := _partial(store, lost, group_id, rollout_id)):
            left.partial[rollout_id] = traces
    return left


def _located(rows: list[tuple[str, str, int, str, int, int]]) -> list[tuple[str, RecordLocation]]:
    return [(rollout_id, RecordLocation(segment, at, n)) for rollout_id, _, ended, segment, at, n in rows if ended]


def _partial(store: Store, lost: Lost, group_id: int, rollout_id: str) -> list[Trace]:
    """Return the saved traces of a rollout: of each trace, the readable parts, from the first one on."""
    parts: dict[int, list[Trace]] = {}
    sql = "SELECT trace, part, segment, offset, length FROM partials WHERE rollout = ? ORDER BY segment, offset, trace"
    rows = store.db.execute(sql, (rollout_id,)).fetchall()
    for at, (number, _, *where) in enumerate(rows):
        try:
            found = store.read(*where)
            if found.id != rollout_id:
                raise DataError(f"{rollout_id}: the record is of {found.id}")
            parts.setdefault(number, []).append(found.traces[number])
        except (DataError, IndexError):
            # The parts after the lost one cannot be used.
            lost.setdefault(where[0], set()).add(group_id)
            for trace, part, *_ in rows[at:]:
                sql = "DELETE FROM partials WHERE rollout = ? AND trace = ? AND part = ?"
                store.write(sql, rollout_id, trace, part)
            break
    nothing = Trace.of_context(np.zeros(0, np.int32))
    return [Trace.joined(parts.get(number) or [nothing]) for number in range(max(parts, default=-1) + 1)]


def _fail_damaged_rows(store: Store, step: int, now: float) -> list[str]:
    """Fail the groups that a resumed run needs and whose rows are damaged. Return a line for each damaged table.

    A step whose row is damaged cannot be trained again. Rows of what the checkpoint holds are only named, and the rows
    of its rollouts are not read: there may be millions.
    """
    names = {"meta": "key", "versions": "id", "groups": "id", "steps": "step", "rollouts": "group_id"}
    found = {table: damaged_rows(store.db, table, name) for table, name in names.items() if table != "rollouts"}
    needed = "group_id IN (SELECT id FROM groups WHERE state = 'in_flight' OR step > ?)"
    found["rollouts"] = damaged_rows(store.db, "rollouts", names["rollouts"], needed, step)
    for group_id in {*found["groups"], *found["rollouts"]}:
        sql = "SELECT state IN ('trained', 'dropped', 'failed') AND COALESCE(step, 0) <= ? FROM groups WHERE id = ?"
        if store.db.execute(sql, (step, group_id)).fetchone() in ((0,), (None,)):
            failed = f"state = 'failed', reason = '{DAMAGED_ROW}', step = NULL, ended = COALESCE(ended, ?)"
            store.write(f"UPDATE groups SET {failed} WHERE id = ?", now, group_id)
            store.write(f"UPDATE rollouts SET {failed} WHERE group_id = ?", now, group_id)
    for damaged in found["steps"]:
        store.write("UPDATE steps SET rollouts = -1 WHERE step = ? AND step > ?", damaged, step)
    if "drawn" in found["meta"]:
        store.write("DELETE FROM meta WHERE key = 'drawn'")
    return [
        f"{store.path} is damaged: rows of the table {table} do not match their checksums "
        f"({names[table]} {_named(rows)}); groups that are needed are failed"
        for table, rows in found.items()
        if rows
    ]


def _named(ids: list[Any]) -> str:
    return ", ".join(map(str, ids[:NAMED])) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


def _forget_lost_tokens(store: Store, step: int) -> Lost:
    """Clear the locations of rollouts whose tokens cannot be read. Return the groups of these rollouts, by segment.

    The records that a resumed run needs, of steps after `step` and of groups in flight, are read and checked. Of the
    other records only the length of their file is.
    """
    lost: Lost = {}
    directory = store.path.parent / "segments"
    sql = "SELECT segment, MAX(offset + length) FROM rollouts WHERE segment IS NOT NULL GROUP BY segment"
    beyond = "SELECT id, group_id, segment FROM rollouts WHERE segment = ? AND offset + length > ?"
    gone = []
    for segment, end in store.db.execute(sql).fetchall():
        path = segment_path(directory, segment)
        size = path.stat().st_size if path.exists() else 0
        if end > size:
            gone += store.db.execute(beyond, (segment, size)).fetchall()
    _forget(store, gone, lost)
    sql = """
        SELECT rollouts.id, group_id, segment, offset, length FROM rollouts JOIN groups ON groups.id = group_id
        WHERE segment IS NOT NULL AND (groups.state = 'in_flight' OR groups.step > ?) ORDER BY segment, offset
    """
    needed = store.db.execute(sql, (step,)).fetchall() if store.segments is not None else []
    _forget(store, [row[:3] for row in needed if not _readable(store, row[0], *row[2:])], lost)
    return lost


def _readable(store: Store, rollout_id: str, segment: str, offset: int, length: int) -> bool:
    try:
        return store.read(segment, offset, length).id == rollout_id
    except DataError:
        return False


def _forget(store: Store, rows: list[tuple[str, int, str]], lost: Lost) -> None:
    for rollout_id, group_id, segment in rows:
        lost.setdefault(segment, set()).add(group_id)
        store.write("UPDATE rollouts SET segment = NULL, offset = NULL, length = NULL WHERE id = ?", rollout_id)


def _describe_damage(store: Store, segment: str, groups: set[int]) -> str:
    """Say which tokens cannot be read. A damaged file is set aside; its intact records are still found."""
    path = segment_path(store.path.parent / "segments", segment)
    several = "s" * (len(groups) > 1)
    said = f"the tokens of group{several} {_named(sorted(groups))} cannot be read, and are sampled again where needed"
    if not path.exists():
        return f"{path} is missing: {said}"
    if path.name == segment:
        set_aside(path)
    return f"{path} is damaged: {said}; the file is kept as {DAMAGED}{segment}"


def _unseen_tokens(store: Store) -> int:
    """Estimate the tokens sampled but not written: the engines' last rate times the time to send and commit."""
    sql = """
        SELECT COALESCE(SUM(generated_tokens) / (MAX(ended) - MIN(started)), 0) FROM activity
        WHERE generated_tokens > 0 AND ended > (SELECT MAX(ended) FROM activity) - 5
    """
    rate = float(store.db.execute(sql).fetchone()[0] or 0.0)
    running = _scalar(store, "SELECT COUNT(*) FROM rollouts WHERE state = 'in_flight'")
    return round(rate * (held_back_seconds(running) + STEP_SECONDS + COMMIT_SECONDS))


def _without_flight(counts: Counts) -> Counts:
    return msgspec.structs.replace(counts, admitted=counts.admitted - counts.in_flight, in_flight=0)


def _scalar(store: Store, sql: str, *row: Any) -> int:
    return int(store.db.execute(sql, row).fetchone()[0])
