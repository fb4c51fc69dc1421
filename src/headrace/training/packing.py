"""The plan of a step's forward passes: which tokens are computed together, and where log-probabilities are read.

Every trained token of a batch is predicted exactly once, from the tokens before it in its own sequence, each computed
by the experts that were recorded for it. A row holds at most the budget, unless a single sequence is longer. Rows for
several ranks are cut alike in cost, and as many for each. Pure arithmetic: equal batches give equal plans; no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.types import Batch, Int16Array, Int32Array

Index = npt.NDArray[np.int64]

PAIRS_PER_TOKEN = 6144
"""Pairs of query and key that cost as much as a token's way through the matrices: six times a hidden size of 1024."""

JOIN_COST = 0.25
"""What joining a token's attention to a shared prefix with that to its own segment takes on a GPU: passes over queries,
outputs and gradients in every layer, as a share of computing the token."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of a row: a sequence, a prefix that several share, or what one of those has of its own."""

    start: int
    length: int
    prefix: int | None = None
    """The index of the segment that comes before this one in its sequence; None where a sequence begins."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length


@dataclass(frozen=True)
class MicroBatch:
    """One row of N packed tokens, and M trained tokens to be read from it: all those of its sequences.

    A sequence is never cut, and a shared prefix holds no trained token, so a loss may look at whole sequences.
    """

    token_ids: Index  # [N]
    position_ids: Index  # [N], counted within each sequence
    segments: tuple[Segment, ...]
    predictors: Index  # [M], where in the row the logits of a trained token are; several may share one
    targets: Index  # [M], the trained token's id
    sources: Index  # [M], the trained token's place in the batch
    sequences: Index  # [M], the trained token's sequence, numbered within the row
    routing: Int16Array | None = None  # [N, layers, k], the experts of the pass over each token; see `Trace.routing`

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def cost(self) -> float:
        """What a pass over the row takes, in tokens: its own, and the attention between them."""
        before = (0 if s.prefix is None else self.segments[s.prefix].length for s in self.segments)
        pairs = sum(s.length * (s.length / 2 + prefix) for s, prefix in zip(self.segments, before, strict=True))
        return len(self) + pairs / PAIRS_PER_TOKEN


@dataclass(frozen=True)
class _Sequence:
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
class _Family:
    """Sequences that begin with the same `prefix` tokens; zero where nothing is shared."""

    members: tuple[_Sequence, ...]
    prefix: int

    @property
    def tokens(self) -> int:
        return self.prefix + sum(len(member.token_ids) - self.prefix for member in self.members)

    @property
    def cost(self) -> float:
        own = [len(member.token_ids) - self.prefix for member in self.members]
        pairs = self.prefix**2 / 2 + sum(length * (length / 2 + self.prefix) for length in own)
        return self.tokens + pairs / PAIRS_PER_TOKEN


def plan(
    batch: Batch, *, micro_batch_tokens: int, share_prefixes: bool, ranks: int = 1, join_cost: float = 0.0
) -> list[MicroBatch]:
    """The rows of a step, in the order in which they are computed; `passes` hands them out to several ranks.

    Prefixes are shared where that saves more tokens than `join_cost` times those that continue them.
    """
    families: dict[int, list[_Sequence]] = {}
    for number, (group, sequence) in enumerate(_sequences(batch)):
        families.setdefault(group if share_prefixes else number, []).append(sequence)
    shared = [part for members in families.values() for part in _where_it_pays(members, join_cost)]
    pieces = [piece for members in shared for piece in _pieces(members, micro_batch_tokens)]
    rows = _first_fit(pieces, micro_batch_tokens)
    if ranks > 1 and rows:
        rows = _even(pieces, micro_batch_tokens, -(-len(rows) // ranks) * ranks, ranks)
    return [_row(families_of_row) for families_of_row in rows]


def passes(rows: Sequence[MicroBatch], rank: int, ranks: int) -> list[tuple[MicroBatch, bool]]:
    """The passes of one rank, as many as any other rank's, and whether each counts.

    Ranks wait for each other in every pass, so rows of like cost go together. Where rows run out, a rank computes the
    cheapest one again, for nothing: the others' weights and gradients pass through it.
    """
    ordered = sorted(rows, key=lambda row: -row.cost)
    mine = []
    for number, start in enumerate(range(0, len(ordered), ranks)):
        # Back and forth, so that no rank always has the costliest.
        place = start + (rank if number % 2 == 0 else ranks - 1 - rank)
        mine.append((ordered[place], True) if place < len(ordered) else (ordered[-1], False))
    return mine


def _first_fit(pieces: Sequence[_Family], budget: int) -> list[list[_Family]]:
    """Longest first: close to the fewest rows; the sort is stable, so the plan is a function of the batch."""
    rows: list[list[_Family]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.tokens):
        row = next((i for i, free in enumerate(room) if piece.tokens <= free), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(budget)
        rows[row].append(piece)
        room[row] -= piece.tokens
    return rows


def _even(pieces: Sequence[_Family], budget: int, count: int, ranks: int) -> list[list[_Family]]:
    """`count` rows of like cost, or the next multiple of `ranks` that holds the pieces; rows that stay empty go."""
    rows: list[list[_Family]] = [[] for _ in range(count)]
    room, costs = [budget] * count, [0.0] * count
    for piece in sorted(pieces, key=lambda piece: -piece.cost):
        fitting = [i for i in range(count) if piece.tokens <= room[i] or not rows[i]]
        if not fitting:
            return _even(pieces, budget, count + ranks, ranks)
        row = min(fitting, key=costs.__getitem__)
        rows[row].append(piece)
        room[row] -= piece.tokens
        costs[row] += piece.cost
    return [row for row in rows if row]


def plan_scoring(token_ids: Int32Array) -> MicroBatch:
    """A row of one sequence in which every token but the first is read."""
    whole = _Sequence(0, token_ids[:-1], np.arange(1, len(token_ids)), token_ids[1:])
    return _row([_Family((whole,), 0)])


def _sequences(batch: Batch) -> Iterator[tuple[int, _Sequence]]:
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    for group, start, end in zip(batch.groups, ends - batch.lengths, ends, strict=True):
        trained = np.flatnonzero(batch.trained[start:end])
        if len(trained) == 0:
            continue
        if trained[0] == 0:
            raise ValueError("the first token of a sequence has nothing before it to be predicted from")
        tokens, last = batch.token_ids[start:end], int(trained[-1])
        routing = None if batch.routing is None else batch.routing[start + 1 : start + 1 + last]
        yield int(group), _Sequence(int(start), tokens[:last], trained, tokens[trained], routing)


def _where_it_pays(members: Sequence[_Sequence], join_cost: float) -> Sequence[Sequence[_Sequence]]:
    """These members as one family, or each alone."""
    prefix = _common_prefix(members)
    saved = prefix * (len(members) - 1)
    joined = sum(len(member.token_ids) - prefix for member in members)
    return [members] if saved >= join_cost * joined else [[member] for member in members]


def _pieces(members: Sequence[_Sequence], budget: int) -> Iterator[_Family]:
    """A family, cut where it is larger than the budget; every piece repeats the prefix."""
    shared = _common_prefix(members)
    taken: list[_Sequence] = []
    size = shared
    for member in members:
        own = len(member.token_ids) - shared
        if taken and size + own > budget:
            yield _family(taken)
            taken, size = [], shared
        taken.append(member)
        size += own
    yield _family(taken)


def _family(members: Sequence[_Sequence]) -> _Family:
    return _Family(tuple(members), _common_prefix(members))


def _common_prefix(members: Sequence[_Sequence]) -> int:
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


def _row(families: Sequence[_Family]) -> MicroBatch:
    tokens: list[Int32Array] = []
    positions: list[Index] = []
    segments: list[Segment] = []
    predictors: list[Index] = []
    targets: list[Int32Array] = []
    sources: list[Index] = []
    sequences: list[Index] = []
    routing: list[Int16Array] = []
    filled = 0

    def add(member: _Sequence, part: slice, prefix: int | None) -> None:
        nonlocal filled
        places = np.arange(len(member.token_ids))[part]
        tokens.append(member.token_ids[part])
        positions.append(places)
        segments.append(Segment(filled, len(places), prefix))
        if member.routing is not None:
            routing.append(member.routing[part])
        filled += len(places)

    for family in families:
        prefix = None
        if family.prefix:
            prefix = len(segments)
            add(family.members[0], slice(family.prefix), None)
        for member in family.members:
            own_start = filled
            add(member, slice(family.prefix, None), prefix)
            # The token at place t is predicted at t - 1, which for the first one may lie in the shared prefix.
            places = member.trained - 1
            own = places - family.prefix + own_start
            predictors.append(
                own if prefix is None else np.where(places < family.prefix, segments[prefix].end - 1, own)
            )
            targets.append(member.targets)
            sources.append(member.offset + member.trained)
            sequences.append(np.full(len(member.trained), len(sequences)))
    return MicroBatch(
        token_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        segments=tuple(segments),
        predictors=np.concatenate(predictors).astype(np.int64),
        targets=np.concatenate(targets).astype(np.int64),
        sources=np.concatenate(sources).astype(np.int64),
        sequences=np.concatenate(sequences).astype(np.int64),
        routing=np.concatenate(routing) if routing else None,
    )
