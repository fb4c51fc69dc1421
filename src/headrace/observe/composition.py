"""Who was trained and who was left out, by length, by difficulty and by outcome: where survivor bias would show.

Counted in SQL from the journal. A group's length is the mean of its answers' sampled tokens, its difficulty the mean of
their rewards; its age is how many versions passed between its admission and its step.
"""

from __future__ import annotations

import sqlite3
from itertools import pairwise

from headrace.observe.page import card, nothing, section, stack, table
from headrace.observe.records import Row, rows
from headrace.observe.summary import number, percent
from headrace.types import republished_among, without_republished

QUARTERS = 4

_GROUPS = """
    SELECT groups.id, groups.state, groups.reason, groups.ended - groups.admitted AS seconds,
        groups.version, steps.version AS trained_as,
        AVG(rollouts.sampled_tokens) AS tokens, AVG(rollouts.reward) AS reward
    FROM groups JOIN rollouts ON rollouts.group_id = groups.id LEFT JOIN steps ON steps.step = groups.step
    WHERE groups.state <> 'in_flight' AND rollouts.ending IS NOT NULL
    GROUP BY groups.id ORDER BY groups.id
"""


def composition(db: sqlite3.Connection) -> str:
    """The section of what training saw of what was generated."""
    lead = "Groups that ended, by how long and how hard they were: every row should be trained alike."
    groups = _with_age(db, rows(db, _GROUPS))
    if not groups:
        return section("Composition", lead, card("Groups", nothing("No group has ended.")))
    cards = [
        card("By length", _table("tokens of an answer", quarters(groups, "tokens"))),
        card("By difficulty", _table("mean reward", quarters(groups, "reward"))),
        card("By outcome", _table("outcome", outcomes(groups))),
    ]
    return section("Composition", lead, stack(*cards))


def _with_age(db: sqlite3.Connection, groups: list[Row]) -> list[Row]:
    """A version that was published again makes no group older."""
    versions = rows(db, "SELECT id, step FROM versions ORDER BY id")
    again = republished_among((row["id"], row["step"]) for row in versions)

    def age(group: Row) -> int | None:
        if group["trained_as"] is None:
            return None
        return int(without_republished(group["trained_as"], again) - without_republished(group["version"], again))

    return [{**group, "age": age(group)} for group in groups]


def quarters(groups: list[Row], key: str) -> list[tuple[str, list[Row]]]:
    """The groups in up to four parts of about equal size, by a number of theirs; equal numbers stay together."""
    known = sorted((group for group in groups if group[key] is not None), key=lambda group: float(group[key]))
    cuts = [known[len(known) * part // QUARTERS][key] for part in range(1, QUARTERS)] if known else []
    edges = [float("-inf"), *sorted(set(cuts)), float("inf")]
    parts = [[group for group in known if low <= group[key] < high] for low, high in pairwise(edges)]
    return [(_span(part, key), part) for part in parts if part]


def outcomes(groups: list[Row]) -> list[tuple[str, list[Row]]]:
    """The groups by how they ended, the most frequent end first."""
    ends: dict[str, list[Row]] = {}
    for group in groups:
        ends.setdefault(group["state"] if group["state"] == "trained" else group["reason"], []).append(group)
    return sorted(ends.items(), key=lambda item: (-len(item[1]), item[0]))


def _span(part: list[Row], key: str) -> str:
    low, high = part[0][key], part[-1][key]
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _table(label: str, parts: list[tuple[str, list[Row]]]) -> str:
    head = [label, "groups", "trained", "mean tokens", "mean reward", "mean age", "mean seconds"]
    lines = [
        [
            name,
            f"{len(part):,}",
            percent(sum(group["state"] == "trained" for group in part) / len(part)),
            *[number(_mean(part, key), 2) for key in ("tokens", "reward", "age", "seconds")],
        ]
        for name, part in parts
    ]
    return table(head, lines)


def _mean(part: list[Row], key: str) -> float | None:
    values = [float(group[key]) for group in part if group[key] is not None]
    return sum(values) / len(values) if values else None
