"""Closing the books of a dead run, so that the next one goes on from balanced ledgers: nothing stays in flight."""

from __future__ import annotations

import msgspec

from headrace.buffer.ledger import Counts
from headrace.buffer.reader import count_ledger
from headrace.buffer.store import Store


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runs before this one stopped."""

    next_group: int
    last_version: int
    """The highest id ever published, -1 if none: the next version takes a higher one."""
    last_step: int
    lost_prompts: list[str]
    """Prompts of the groups that were interrupted or rolled back, oldest first."""
    groups: Counts
    rollouts: Counts


def recover(store: Store, step: int | None, now: float) -> Recovered:
    """Drop what was in flight and, with `step`, what later steps trained. Call inside a transaction."""
    lost = "state = 'in_flight'" if step is None else f"(state = 'in_flight' OR step > {int(step)})"
    prompts = [prompt for (prompt,) in store.db.execute(f"SELECT prompt FROM groups WHERE {lost} ORDER BY id")]
    for table in ("groups", "rollouts"):
        store.write(
            f"UPDATE {table} SET reason = iif(state = 'in_flight', 'interrupted', 'rolled back'),"
            f" state = 'dropped', step = NULL, ended = COALESCE(ended, ?) WHERE {lost}",
            now,
        )
    if step is not None:
        store.write("DELETE FROM steps WHERE step > ?", step)
    _forget_lost_segments(store)
    return Recovered(
        next_group=_scalar(store, "SELECT COALESCE(MAX(id) + 1, 0) FROM groups"),
        last_version=_scalar(store, "SELECT COALESCE(MAX(id), -1) FROM versions"),
        last_step=_scalar(store, "SELECT COALESCE(MAX(step), 0) FROM steps"),
        lost_prompts=prompts,
        groups=count_ledger(store.db, "groups"),
        rollouts=count_ledger(store.db, "rollouts"),
    )


def _forget_lost_segments(store: Store) -> None:
    """After a power failure, rows may point at bytes that never reached the disk."""
    sql = "SELECT segment, MAX(offset + length) FROM rollouts WHERE segment IS NOT NULL GROUP BY segment"
    for segment, end in store.db.execute(sql).fetchall():
        path = store.path.parent / "segments" / segment
        size = path.stat().st_size if path.exists() else 0
        if end > size:
            sql = "UPDATE rollouts SET segment = NULL, offset = NULL, length = NULL WHERE segment = ? AND"
            store.write(f"{sql} offset + length > ?", segment, size)


def _scalar(store: Store, sql: str) -> int:
    return int(store.db.execute(sql).fetchone()[0])
