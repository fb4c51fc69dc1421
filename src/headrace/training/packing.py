"""The plan of a step's forward passes: which tokens are computed together, and where log-probabilities are read.

Every trained token of a batch is predicted exactly once, from the tokens before it in its own sequence, each computed
by the experts that were recorded for it. A row holds at most the budget, unless a single sequence is longer. Rows for
several ranks are alike in cost, and as many for each; for that, sequences that share a prefix are computed apart where
this takes less time than computing the prefix once. Pure arithmetic: equal batches give equal plans; no torch.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
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

PARTS_OF_A_ROW = (1, 2, 4)
"""How finely families are cut for several ranks, between whole families and single sequences: parts for a row."""


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
    join_cost: float = 0.0
    """What a token takes more where it continues a shared prefix, as a share of computing it."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def cost(self) -> float:
        """What a pass over the row takes, in tokens: its own, the attention between them, and joining that."""
        own = sum(_cost(s.length, 0 if s.prefix is None else self.segments[s.prefix].length) for s in self.segments)
        return own + self.join_cost * sum(s.length for s in self.segments if s.prefix is not None)


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


@dataclass(frozen=True, eq=False)
class _Kin:
    """What the members of one family have in common; no two families have the same, even if it is alike."""

    prefix: int
    prefix_cost: float
    join_cost: float

    def takes(self, members: int, own: int, own_cost: float) -> tuple[int, float]:
        """The tokens and the cost of members in one row: with the prefix once if that pays, or else for each."""
        if _pays(self.prefix, members, own, self.join_cost):
            return self.prefix + own, self.prefix_cost + own_cost + self.join_cost * own
        return members * self.prefix + own, members * self.prefix_cost + own_cost


@dataclass(slots=True)
class _Part:
    """Some members of a family, to be computed in one row."""

    kin: _Kin
    members: tuple[_Sequence, ...]
    own: int
    """Tokens behind the prefix."""
    own_cost: float
    """What those take, without joining their attention to the prefix's."""
    tokens: int
    cost: float

    @property
    def shares(self) -> bool:
        return _pays(self.kin.prefix, len(self.members), self.own, self.kin.join_cost)

    @property
    def families(self) -> list[_Family]:
        """These members as `_row` computes them; what they have in common may be more than the whole family has."""
        return [_family(self.members)] if self.shares else [_family([member]) for member in self.members]


class _Load:
    """A row that is being filled; parts of one family are one."""

    def __init__(self) -> None:
        self.parts: dict[_Kin, _Part] = {}
        self.tokens = 0
        self.cost = 0.0

    def cost_with(self, part: _Part, budget: int) -> float:
        """What the row takes with a part, which is less if some of its family are here; infinite if it has no room."""
        tokens, cost = part.tokens, part.cost
        here = self.parts.get(part.kin)
        if here is not None:
            members = len(here.members) + len(part.members)
            tokens, cost = part.kin.takes(members, here.own + part.own, here.own_cost + part.own_cost)
            tokens, cost = tokens - here.tokens, cost - here.cost
        return self.cost + cost if not self.parts or self.tokens + tokens <= budget else math.inf

    def add(self, part: _Part) -> None:
        here = self.parts.get(part.kin)
        both = part if here is None else _together([here, part])
        self.parts[part.kin] = both
        self.tokens += both.tokens - (0 if here is None else here.tokens)
        self.cost += both.cost - (0.0 if here is None else here.cost)


def plan(
    batch: Batch, *, micro_batch_tokens: int, share_prefixes: bool, ranks: int = 1, join_cost: float = 0.0
) -> list[MicroBatch]:
    """The rows of a step, in the order in which they are computed; `passes` hands them out to several ranks.

    Prefixes are shared where that saves more tokens than `join_cost` times those that continue them.
    """
    groups: dict[int, list[_Sequence]] = {}
    for number, (group, sequence) in enumerate(_sequences(batch)):
        groups.setdefault(group if share_prefixes else number, []).append(sequence)
    families = [family for members in groups.values() for family in _where_it_pays(members, join_cost)]
    if ranks > 1:
        loads = _for_ranks(families, micro_batch_tokens, ranks, join_cost)
        rows = [[family for part in load.parts.values() for family in part.families] for load in loads]
    else:
        # A rank that waits for no other takes the sum of its rows, however uneven: the fewest are the fastest.
        pieces = [piece for family in families for piece in _pieces(family, micro_batch_tokens)]
        rows = [[pieces[i] for i in row] for row in _first_fit([p.tokens for p in pieces], micro_batch_tokens)]
    return [_row(families_of_row, join_cost) for families_of_row in rows]


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


def _first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
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


def _for_ranks(families: Sequence[_Family], budget: int, ranks: int, join_cost: float) -> list[_Load]:
    """The rows that take the least time on ranks that wait for each other in every pass.

    Whole families may leave ranks with nothing to do, and every cut repeats a prefix: families are tried whole, cut
    ever finer, and without sharing. The first of the fastest is taken.
    """
    alone = [_singles(_Family((member,), 0), join_cost)[0] for family in families for member in family.members]
    if not any(family.prefix for family in families):
        return _even(alone, budget, ranks)
    blocks = [block for family in families for block in _blocks(_singles(family, join_cost), budget)]
    whole = _parts(blocks, math.inf)
    found = [_even(whole, budget, ranks)]
    row_cost = sum(part.own_cost for part in whole) / (-(-len(found[0]) // ranks) * ranks)
    cuts = [whole, *(_parts(blocks, row_cost / parts) for parts in PARTS_OF_A_ROW), list(itertools.chain(*blocks))]
    found += [_even(cut, budget, ranks) for coarser, cut in itertools.pairwise(cuts) if len(cut) > len(coarser)]
    fastest = min(found, key=lambda rows: _wall(rows, ranks))
    # What ranks take at least that share nothing, however even.
    if _wall(fastest, ranks) <= sum(part.cost for part in alone) / ranks:
        return fastest
    return min(fastest, _even(alone, budget, ranks), key=lambda rows: _wall(rows, ranks))


def _wall(rows: Sequence[_Load], ranks: int) -> float:
    """How long ranks take that wait for each other in every pass; see `passes`."""
    return sum(sorted((row.cost for row in rows), reverse=True)[::ranks])


def _singles(family: _Family, join_cost: float) -> list[_Part]:
    """A part for every member."""
    kin = _Kin(family.prefix, _cost(family.prefix, 0), join_cost)
    parts = []
    for member in family.members:
        own = len(member.token_ids) - kin.prefix
        own_cost = _cost(own, kin.prefix)
        parts.append(_Part(kin, (member,), own, own_cost, *kin.takes(1, own, own_cost)))
    return parts


def _together(parts: Sequence[_Part]) -> _Part:
    """Parts of one family as one."""
    kin, members = parts[0].kin, tuple(member for part in parts for member in part.members)
    own, own_cost = sum(part.own for part in parts), sum(part.own_cost for part in parts)
    return _Part(kin, members, own, own_cost, *kin.takes(len(members), own, own_cost))


def _blocks(singles: Sequence[_Part], budget: int) -> list[list[_Part]]:
    """Members of a family, those together that hold the budget with one prefix."""
    rows = _first_fit([single.own for single in singles], budget - singles[0].kin.prefix)
    return [[singles[i] for i in row] for row in rows]


def _parts(blocks: Sequence[Sequence[_Part]], most: float) -> list[_Part]:
    """A part of each block, or several if it costs more than `most` without its prefix; members if none is shared."""
    parts: list[_Part] = []
    for block in blocks:
        cost = sum(single.own_cost for single in block)
        for cut in _cut(block, math.ceil(cost / most)) if cost > most else [block]:
            part = _together(cut)
            parts.extend([part] if part.shares else cut)
    return parts


def _cut(singles: Sequence[_Part], count: int) -> list[Sequence[_Part]]:
    """At most `count` lists of like cost."""
    lists: list[list[_Part]] = [[] for _ in range(min(count, len(singles)))]
    costs = [0.0] * len(lists)
    for single in sorted(singles, key=lambda single: -single.own_cost):
        cheapest = costs.index(min(costs))
        lists[cheapest].append(single)
        costs[cheapest] += single.own_cost
    return [cut for cut in lists if cut]


def _even(parts: Sequence[_Part], budget: int, ranks: int) -> list[_Load]:
    """Rows of like cost, for about the fewest passes of all ranks that hold the parts; rows that stay empty go."""
    ordered = sorted(parts, key=lambda part: -part.cost)
    fewest = -(-len(_first_fit([part.tokens for part in parts], budget)) // ranks)
    filled = (_fill(ordered, budget, times * ranks) for times in itertools.count(fewest))
    return [row for row in next(rows for rows in filled if rows is not None) if row.parts]


def _fill(parts: Sequence[_Part], budget: int, count: int) -> list[_Load] | None:
    """Every part in the cheapest row with room, or the cheapest of its family if that takes less then; None if full."""
    rows = [_Load() for _ in range(count)]
    by_cost = [(0.0, i) for i in range(count)]
    homes: dict[_Kin, set[int]] = {}
    for part in parts:
        home = homes.setdefault(part.kin, set())
        options = ((rows[i].cost_with(part, budget), i) for _, i in by_cost)
        best = next((option for option in options if option[0] < math.inf), None)
        if best is None:
            return None
        if home:
            related = min(home, key=lambda i: (rows[i].cost, i))
            best = min(best, (rows[related].cost_with(part, budget), related))
        row = best[1]
        del by_cost[bisect_left(by_cost, (rows[row].cost, row))]
        rows[row].add(part)
        insort(by_cost, (rows[row].cost, row))
        home.add(row)
    return rows


def plan_scoring(token_ids: Int32Array) -> MicroBatch:
    """A row of one sequence in which every token but the first is read."""
    whole = _Sequence(0, token_ids[:-1], np.arange(1, len(token_ids)), token_ids[1:])
    return _row([_Family((whole,), 0)], join_cost=0.0)


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


def _where_it_pays(members: Sequence[_Sequence], join_cost: float) -> list[_Family]:
    """These members as one family, or each alone."""
    together = _family(members)
    joined = together.tokens - together.prefix
    if _pays(together.prefix, len(members), joined, join_cost):
        return [together]
    return [_family([member]) for member in members]


def _pays(prefix: int, members: int, own: int, join_cost: float) -> bool:
    """Whether a prefix computed once saves what it takes to join the `own` tokens that continue it to it."""
    return prefix * (members - 1) >= max(1, join_cost * own)


def _cost(length: int, before: int) -> float:
    """What tokens take that come behind `before` others, in tokens: their own, and their attention."""
    return length + length * (length / 2 + before) / PAIRS_PER_TOKEN


def _pieces(family: _Family, budget: int) -> Iterator[_Family]:
    """A family, cut where it is larger than the budget; every piece repeats the prefix."""
    taken: list[_Sequence] = []
    size = family.prefix
    for member in family.members:
        own = len(member.token_ids) - family.prefix
        if taken and size + own > budget:
            yield _family(taken)
            taken, size = [], family.prefix
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


def _row(families: Sequence[_Family], join_cost: float) -> MicroBatch:
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
        join_cost=join_cost,
    )
