"""The plan of a step's forward passes: which tokens are computed together, and where log-probabilities are read.

Every trained token of a batch is predicted exactly once, from the tokens before it in its own sequence. Each token is
computed by the experts that were recorded for it. A row holds at most the token budget, unless a single sequence is
longer. With several ranks, all rows cost about the same and every rank gets the same number of rows; sequences that
share a prefix are computed separately where that takes less time than computing the prefix once. The plan is pure
arithmetic without torch: equal batches give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.training.rows.base import Family, Index, Member, MicroBatch, Segment, families_of, family_of, first_fit
from headrace.training.rows.for_ranks import rows_for_ranks
from headrace.types import Batch, Int16Array, Int32Array

JOIN_COST = 0.25
"""The cost, on a GPU, of joining a token's attention to a shared prefix with its attention to its own segment. Joining
takes passes over queries, outputs and gradients in every layer. The cost is a fraction of computing the token."""


def plan(
    batch: Batch, *, micro_batch_tokens: int, share_prefixes: bool, ranks: int = 1, join_cost: float = 0.0
) -> list[MicroBatch]:
    """Return the rows of a step, in the order in which they are computed. `passes` distributes them over several ranks.

    A prefix is shared where that saves more tokens than `join_cost` times the number of tokens that continue the
    prefix.
    """
    groups: dict[int, list[Member]] = {}
    for number, (group, sequence) in enumerate(_sequences(batch)):
        groups.setdefault(group if share_prefixes else number, []).append(sequence)
    families = [family for members in groups.values() for family in families_of(members, join_cost)]
    if ranks > 1:
        rows = rows_for_ranks(families, micro_batch_tokens, ranks, join_cost)
    else:
        # A single rank waits for no other, so its time is the sum of its rows, however uneven. Fewest rows are fastest.
        pieces = [piece for family in families for piece in _pieces(family, micro_batch_tokens)]
        rows = [[pieces[i] for i in row] for row in first_fit([p.tokens for p in pieces], micro_batch_tokens)]
    return [_row(families_of_row, join_cost) for families_of_row in rows]


def passes(rows: Sequence[MicroBatch], rank: int, ranks: int) -> list[tuple[MicroBatch, bool]]:
    """Return the passes of one rank, and for each pass whether its result counts.

    Every rank gets the same number of passes. Ranks wait for each other in every pass, so rows of similar cost are
    computed at the same time. When rows run out, a rank computes the cheapest row again and the result does not count:
    the other ranks need this rank to take part in gathering weights and reducing gradients.
    """
    ordered = sorted(rows, key=lambda row: -row.cost)
    mine = []
    for number, start in enumerate(range(0, len(ordered), ranks)):
        # The direction alternates, so that no rank always gets the most expensive row.
        place = start + (rank if number % 2 == 0 else ranks - 1 - rank)
        mine.append((ordered[place], True) if place < len(ordered) else (ordered[-1], False))
    return mine


def plan_scoring(token_ids: Int32Array) -> MicroBatch:
    """Return a row of one sequence in which every token but the first is read."""
    whole = Member(0, token_ids[:-1], np.arange(1, len(token_ids)), token_ids[1:])
    return _row([Family((whole,), 0)], join_cost=0.0)


def _sequences(batch: Batch) -> Iterator[tuple[int, Member]]:
    ends = np.cumsum(batch.lengths, dtype=np.int64)
    for group, start, end in zip(batch.groups, ends - batch.lengths, ends, strict=True):
        trained = np.flatnonzero(batch.trained[start:end])
        if len(trained) == 0:
            continue
        if trained[0] == 0:
            raise ValueError("the first token of a sequence has nothing before it to be predicted from")
        tokens, last = batch.token_ids[start:end], int(trained[-1])
        routing = None if batch.routing is None else batch.routing[start + 1 : start + 1 + last]
        yield int(group), Member(int(start), tokens[:last], trained, tokens[trained], routing)


def _pieces(family: Family, budget: int) -> Iterator[Family]:
    """Cut a family that is larger than the budget into pieces. Every piece repeats the prefix."""
    taken: list[Member] = []
    size = family.prefix
    for member in family.members:
        own = len(member.token_ids) - family.prefix
        if taken and size + own > budget:
            yield family_of(taken)
            taken, size = [], family.prefix
        taken.append(member)
        size += own
    yield family_of(taken)


def _row(families: Sequence[Family], join_cost: float) -> MicroBatch:
    tokens: list[Int32Array] = []
    positions: list[Index] = []
    segments: list[Segment] = []
    predictors: list[Index] = []
    targets: list[Int32Array] = []
    sources: list[Index] = []
    sequences: list[Index] = []
    routing: list[Int16Array] = []
    filled = 0

    def add(member: Member, part: slice, prefix: int | None) -> None:
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
            # The token at place t is predicted at t - 1. For the first trained token, that place may be in the shared
            # prefix.
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
        join_cost=join_cost,
    )
