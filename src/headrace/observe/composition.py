"""Which groups were trained and which were not, by length, difficulty and outcome. Survivor bias would show here.

A group's length is the mean number of sampled tokens of its answers. Its difficulty is the mean of their rewards. Its
age is the number of versions between its admission and its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headrace.observe.page import card, nothing, section, stack, table
from headrace.observe.records import EndedGroup
from headrace.observe.summary import number, percent

QUARTERS = 4


def composition(groups: Sequence[EndedGroup]) -> str:
    """Draw the section that shows which of the generated groups were trained."""
    lead = "Groups that ended, by how long and how hard they were: every row should be trained alike."
    if not groups:
        return section("Composition", lead, card("Groups", nothing("No group has ended.")))
    cards = [
        card("By length", _table("tokens of an answer", quarters(groups, "tokens"))),
        card("By difficulty", _table("mean reward", quarters(groups, "reward"))),
        card("By outcome", _table("outcome", outcomes(groups))),
    ]
    return section("Composition", lead, stack(*cards))


def quarters(groups: Sequence[EndedGroup], key: str) -> list[tuple[str, list[EndedGroup]]]:
    """Split the groups into up to four parts of about equal size, by the number `key`. Equal numbers stay together."""

    def of(group: EndedGroup) -> float:
        return float(getattr(group, key))

    known = sorted((group for group in groups if getattr(group, key) is not None), key=of)
    cuts = [of(known[len(known) * part // QUARTERS]) for part in range(1, QUARTERS)] if known else []
    edges = [float("-inf"), *sorted(set(cuts)), float("inf")]
    parts = [[group for group in known if low <= of(group) < high] for low, high in pairwise(edges)]
    return [(_span(of(part[0]), of(part[-1])), part) for part in parts if part]


def outcomes(groups: Sequence[EndedGroup]) -> list[tuple[str, list[EndedGroup]]]:
    """Return the groups by how they ended, the most frequent ending first."""
    ends: dict[str, list[EndedGroup]] = {}
    for group in groups:
        ends.setdefault(group.state if group.state == "trained" else group.reason, []).append(group)
    return sorted(ends.items(), key=lambda item: (-len(item[1]), item[0]))


def _span(low: float, high: float) -> str:
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _table(label: str, parts: list[tuple[str, list[EndedGroup]]]) -> str:
    head = [label, "groups", "trained", "mean tokens", "mean reward", "mean age", "mean seconds"]
    lines = [
        [
            name,
            f"{len(part):,}",
            percent(sum(group.state == "trained" for group in part) / len(part)),
            *[number(_mean(part, key), 2) for key in ("tokens", "reward", "age", "seconds")],
        ]
        for name, part in parts
    ]
    return table(head, lines)


def _mean(part: list[EndedGroup], key: str) -> float | None:
    values = [float(value) for group in part if (value := getattr(group, key)) is not None]
    return sum(values) / len(values) if values else None
