"""The sequences of a batch, families of sequences that can share computation, and the row into which they are packed.

A family's sequences begin with the same tokens, so these tokens may be computed once for all of them.

Costs are counted in tokens: the unit is what one token costs in the model's matrix products. No torch is imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.types import Int16Array, Int32Array

Index = npt.NDArray[np.int64]

PAIRS_PER_TOKEN = 6144
"""The number of query-key pairs that cost as much as one token in the matrix products: six times a hidden size of
1024."""


@dataclass(frozen=True)
class Member:
    """A sequence of the batch up to its last trained token, which is only a target and is not computed."""

    offset: int
    token_ids: Int32Array
    trained: Index
    """The positions of the trained tokens within the sequence."""
    targets: Int32Array
    routing: Int16Array | None = None
    """The experts that each token goes through. The record of a token's experts belongs to the next token, because the
    engine samples that token in the same pass."""


@dataclass(frozen=True)
class Family:
    """Sequences that begin with the same `prefix` tokens. `prefix` is zero where nothing is shared."""

    members: tuple[Member, ...]
    prefix: int

    @property
    def tokens(self) -> int:
        """The number of tokens of all members, with the prefix counted once."""
        return self.prefix + sum(len(member.token_ids) - self.prefix for member in self.members)


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a row: a whole sequence, a shared prefix, or the rest of a sequence after that prefix."""

    start: int
    length: int
    prefix: int | None = None
    """The index of the segment that precedes this one in its sequence. None where a sequence begins."""

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class MicroBatch:
    """One row of N packed tokens, and the M trained tokens of its sequences, which are read from the row.

    A sequence is never cut, and a shared prefix holds no trained token, so a loss may look at whole sequences.
    """

    token_ids: Index  # [N]
    position_ids: Index  # [N], counted within each sequence
    segments: tuple[Segment, ...]
    predictors: Index  # [M], where in the row the logits of a trained token are; several tokens may share one place
    targets: Index  # [M], the trained token's id
    sources: Index  # [M], the trained token's place in the batch
    sequences: Index  # [M], the trained token's sequence, numbered within the row
    routing: Int16Array | None = None  # [N, layers, k], the experts of the pass over each token; see `Trace.routing`
    join_cost: float = 0.0
    """The extra cost of a token that continues a shared prefix, as a fraction of computing the token."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def cost(self) -> float:
        """The cost of a pass over the row, in tokens: computing the tokens, their attention, and joining attention."""
        own = sum(cost_of(s.length, 0 if s.prefix is None else self.segments[s.prefix].length) for s in self.segments)
        return own + self.join_cost * sum(s.length for s in self.segments if s.prefix is not None)


def family_of(members: Sequence[Member]) -> Family:
    """Return these members as a family, with the longest prefix that they have in common.

    Trained tokens never count, and the prefix of a single member is 0. A shared token is computed once, with one set of
    experts, so tokens with different recorded experts do not count as common.
    """
    if len(members) < 2:
        return Family(tuple(members), 0)
    first = members[0]
    shared = min(int(member.trained[0]) for member in members)
    for member in members[1:]:
        differs = first.token_ids[:shared] != member.token_ids[:shared]
        if first.routing is not None and member.routing is not None:
            differs |= (first.routing[:shared] != member.routing[:shared]).any((1, 2))
        shared = int(differs.argmax()) if differs.any() else shared
    return Family(tuple(members), shared)


def families_of(members: Sequence[Member], join_cost: float) -> list[Family]:
    """Return these members as one family if sharing the prefix pays, else each member as its own family."""
    together = family_of(members)
    joined = together.tokens - together.prefix
    if pays(together.prefix, len(members), joined, join_cost):
        return [together]
    return [family_of([member]) for member in members]


def pays(prefix: int, members: int, own: int, join_cost: float) -> bool:
    """Return whether computing a prefix once saves more than joining the attention of the `own` tokens after it."""
    return prefix * (members - 1) >= max(1, join_cost * own)


def cost_of(length: int, before: int) -> float:
    """Return the cost of `length` tokens that follow `before` others: computing the tokens, and their attention."""
    return length + length * (length / 2 + before) / PAIRS_PER_TOKEN


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Divide sizes into rows of at most `budget`, largest first, and return the indices of each row.

    The number of rows is close to the smallest possible. Equal sizes keep their order. A size that is larger than the
    budget gets a row of its own.
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
