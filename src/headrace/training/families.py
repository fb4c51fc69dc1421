"""Sequences of a batch, and families of those that begin alike: what can be computed once, and what it takes.

Costs are in tokens: what a token's way through the matrices takes. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.types import Int16Array, Int32Array

Index = npt.NDArray[np.int64]

PAIRS_PER_TOKEN = 6144
"""Pairs of query and key that cost as much as a token's way through the matrices: six times a hidden size of 1024."""


@dataclass(frozen=True)
class Member:
    """A sequence of the batch up to its last trained token, which is a target and needs no computing itself."""

    offset: int
    token_ids: Int32Array
    trained: Index
    """Places of the trained tokens within the sequence."""
    targets: Int32Array
    routing: Int16Array | None = None
    """Of the pass over each token: what was recorded with the token after it."""

    @property
    def context(self) -> int:
        """How many tokens come before the first trained one."""
        return int(self.trained[0])


@dataclass(frozen=True)
class Family:
    """Sequences that begin with the same `prefix` tokens; zero where nothing is shared."""

    members: tuple[Member, ...]
    prefix: int

    @property
    def tokens(self) -> int:
        """Of all members, the prefix once."""
        return self.prefix + sum(len(member.token_ids) - self.prefix for member in self.members)


def family_of(members: Sequence[Member]) -> Family:
    """These members with all that they have in common."""
    return Family(tuple(members), _common_prefix(members))


def _common_prefix(members: Sequence[Member]) -> int:
    """How many leading tokens, none of them trained, all members have in common; none for a member alone.

    What is computed once has one set of experts: tokens whose records differ are not in common.
    """
    if len(members) < 2:
        return 0
    first = members[0]
    shared = min(member.context for member in members)
    for member in members[1:]:
        differs = first.token_ids[:shared] != member.token_ids[:shared]
        if first.routing is not None and member.routing is not None:
            differs |= (first.routing[:shared] != member.routing[:shared]).any((1, 2))
        shared = int(differs.argmax()) if differs.any() else shared
    return shared


def families_of(members: Sequence[Member], join_cost: float) -> list[Family]:
    """These members as one family, or each alone."""
    together = family_of(members)
    joined = together.tokens - together.prefix
    if pays(together.prefix, len(members), joined, join_cost):
        return [together]
    return [family_of([member]) for member in members]


def pays(prefix: int, members: int, own: int, join_cost: float) -> bool:
    """Whether a prefix computed once saves what it takes to join the `own` tokens that continue it to it."""
    return prefix * (members - 1) >= max(1, join_cost * own)


def cost_of(length: int, before: int) -> float:
    """What tokens take that come behind `before` others, in tokens: their own, and their attention."""
    return length + length * (length / 2 + before) / PAIRS_PER_TOKEN


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Which sizes go together, longest first: close to the fewest rows; the sort is stable, so equal sizes keep order.

    What is larger than the budget is alone.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((row for row, free in enumerate(room) if sizes[i] <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget)
        rows[row].append(i)
        room[row] -= sizes[i]
    return rows
