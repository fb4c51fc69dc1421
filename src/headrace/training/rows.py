"""The rows of a step: which tokens are computed together, on which rank, and where log-probabilities are read.

Every trained token of a batch is predicted exactly once, from the tokens before it in its own sequence. Each token is
computed by the experts that were recorded for it. A row holds at most the token budget, unless a single sequence is
longer. A family's sequences begin with the same tokens, so these tokens may be computed once for all of them. With
several ranks, all rows cost about the same and every rank gets the same number of rows; sequences that share a prefix
are computed separately where that takes less time than computing the prefix once.

Costs are counted in tokens: the unit is what one token costs in the model's matrix products. The plan is pure
arithmetic without torch: equal batches give equal plans.
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
"""The number of query-key pairs that cost as much as one token in the matrix products: six times a hidden size of
1024."""
JOIN_COST = 0.25
"""The cost, on a GPU, of joining a token's attention to a shared prefix with its attention to its own segment. Joining
takes passes over queries, outputs and gradients in every layer. The cost is a fraction of computing the token."""
PARTS_OF_A_ROW = (1, 2, 4)
"""How finely families are cut for several ranks, between whole families and single sequences: the number of parts that
fill a row."""


@dataclass(frozen=True)
class Member:
    """A sequence of the batch up to its last trained token, which is only a target and is not computed."""

    offset: int
    token_ids: Int32Array
    trained: Index
    """The positions of the trained tokens within the sequence."""
    targets: Int32Array
    routing: Int16Array | None = None
    """The experts that each token goes through. A trace has them beside the next token, which the same pass sampled."""


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
        own = sum(_cost_of(s.length, 0 if s.prefix is None else self.segments[s.prefix].length) for s in self.segments)
        return own + self.join_cost * sum(s.length for s in self.segments if s.prefix is not None)


def _family_of(members: Sequence[Member]) -> Family:
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


def _families_of(members: Sequence[Member], join_cost: float) -> list[Family]:
    """Return these members as one family if sharing the prefix pays, else each member as its own family."""
    together = _family_of(members)
    joined = together.tokens - together.prefix
    if _pays(together.prefix, len(members), joined, join_cost):
        return [together]
    return [_family_of([member]) for member in members]


def _pays(prefix: int, members: int, own: int, join_cost: float) -> bool:
    """Return whether computing a prefix once saves more than joining the attention of the `own` tokens after it."""
    return prefix * (members - 1) >= max(1, join_cost * own)


def _cost_of(length: int, before: int) -> float:
    """Return the cost of `length` tokens that follow `before` others: computing the tokens, and their attention."""
    return length + length * (length / 2 + before) / PAIRS_PER_TOKEN


def _first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Divide sizes, largest first, into about the fewest rows of at most `budget`. Return the indices of each row.

    Equal sizes keep their order. A size that is larger than the budget gets a row of its own.
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


def plan(
    batch: Batch, *, micro_batch_tokens: int, share_prefixes: bool, ranks: int = 1, join_cost: float = 0.0
) -> list[MicroBatch]:
    """Return the rows of a step, in the order in which they are computed. `passes` distributes them over several ranks.

    A prefix is shared where that saves more tokens than `join_cost` times the tokens that continue it.
    """
    groups: dict[int, list[Member]] = {}
    for number, (group, sequence) in enumerate(_sequences(batch)):
        groups.setdefault(group if share_prefixes else number, []).append(sequence)
    families = [family for members in groups.values() for family in _families_of(members, join_cost)]
    if ranks > 1:
        loads = _rows_for_ranks(families, micro_batch_tokens, ranks, join_cost)
        rows = [[family for part in load.parts.values() for family in part.families] for load in loads]
    else:
        # A single rank waits for no other, so its time is the sum of its rows, however uneven. Fewest rows are fastest.
        pieces = [piece for family in families for piece in _pieces(family, micro_batch_tokens)]
        rows = [[pieces[i] for i in row] for row in _first_fit([p.tokens for p in pieces], micro_batch_tokens)]
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
            yield _family_of(taken)
            taken, size = [], family.prefix
        taken.append(member)
        size += own
    yield _family_of(taken)


def _row(families: Sequence[Family], join_cost: float) -> MicroBatch:
    tokens: list[Int32Array] = []
    positions: list[Index] = []
    segments: list[Segment] = []
    predictors: list[Index] = []
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
            # The token at place t is predicted at t - 1, which may be in the shared prefix for the first trained token.
            places = member.trained - 1
            own = places - family.prefix + own_start
            predictors.append(
                own if prefix is None else np.where(places < family.prefix, segments[prefix].end - 1, own)
            )
    members = [member for family in families for member in family.members]
    return MicroBatch(
        token_ids=np.concatenate(tokens).astype(np.int64),
        position_ids=np.concatenate(positions),
        segments=tuple(segments),
        predictors=np.concatenate(predictors),
        targets=np.concatenate([member.targets for member in members]).astype(np.int64),
        sources=np.concatenate([member.offset + member.trained for member in members]),
        sequences=np.repeat(np.arange(len(members)), [len(member.trained) for member in members]),
        routing=np.concatenate(routing) if routing else None,
        join_cost=join_cost,
    )


def _rows_for_ranks(families: Sequence[Family], budget: int, ranks: int, join_cost: float) -> list[_Load]:
    """Return the rows that take the least time on ranks that wait for each other in every pass.

    The most expensive row of each pass decides the time, so families are cut as finely as makes the ranks faster: the
    plans are families whole, cut finer and finer, and sharing nothing. If plans are equally fast, the coarsest one is
    taken. Whole families may leave ranks without work, but every cut repeats a prefix. Every rank
    computes the plan alone and gets the same result.
    """
    alone = [_singles(Family((member,), 0), join_cost)[0] for family in families for member in family.members]
    if not any(family.prefix for family in families):
        return _even(alone, budget, ranks)
    blocks = [block for family in families for block in _blocks(_singles(family, join_cost), budget)]
    whole = _parts(blocks, math.inf)
    found = [_even(whole, budget, ranks)]
    row_cost = sum(part.own_cost for part in whole) / (-(-len(found[0]) // ranks) * ranks)
    cuts = [whole, *(_parts(blocks, row_cost / parts) for parts in PARTS_OF_A_ROW), list(itertools.chain(*blocks))]
    found += [_even(cut, budget, ranks) for coarser, cut in itertools.pairwise(cuts) if len(cut) > len(coarser)]
    fastest = min(found, key=lambda rows: _wall(rows, ranks))
    # The right side is a lower bound on the time without sharing: it assumes perfectly even rows.
    if _wall(fastest, ranks) <= sum(part.cost for part in alone) / ranks:
        return fastest
    return min(fastest, _even(alone, budget, ranks), key=lambda rows: _wall(rows, ranks))


@dataclass(frozen=True, eq=False)
class _Siblings:
    """The common prefix of one family, compared by identity: two families with equal values stay separate."""

    prefix: int
    prefix_cost: float
    join_cost: float

    def takes(self, members: int, own: int, own_cost: float) -> tuple[int, float]:
        """Return tokens and cost of members in one row. The prefix is computed once if that pays, else per member."""
        if _pays(self.prefix, members, own, self.join_cost):
            return self.prefix + own, self.prefix_cost + own_cost + self.join_cost * own
        return members * self.prefix + own, members * self.prefix_cost + own_cost


@dataclass(slots=True)
class _Part:
    """Some members of a family that are computed in one row."""

    siblings: _Siblings
    members: tuple[Member, ...]
    own: int
    """The number of tokens after the prefix, of all members."""
    own_cost: float
    """The cost of the tokens after the prefix, without joining their attention to the attention of the prefix."""
    tokens: int
    cost: float

    @property
    def shares(self) -> bool:
        return _pays(self.siblings.prefix, len(self.members), self.own, self.siblings.join_cost)

    @property
    def families(self) -> list[Family]:
        """The members as families for `_row`. Some members may have a longer common prefix than the whole family."""
        return [_family_of(self.members)] if self.shares else [_family_of([member]) for member in self.members]


class _Load:
    """A row that is being filled. Parts of the same family are merged into one part."""

    def __init__(self) -> None:
        self.parts: dict[_Siblings, _Part] = {}
        self.tokens = 0
        self.cost = 0.0

    def cost_with(self, part: _Part, budget: int) -> float:
        """Return the cost of the row with this part, or infinity if it does not fit.

        A part costs less if members of its family are in the row already.
        """
        tokens, cost = part.tokens, part.cost
        here = self.parts.get(part.siblings)
        if here is not None:
            members = len(here.members) + len(part.members)
            tokens, cost = part.siblings.takes(members, here.own + part.own, here.own_cost + part.own_cost)
            tokens, cost = tokens - here.tokens, cost - here.cost
        return self.cost + cost if not self.parts or self.tokens + tokens <= budget else math.inf

    def add(self, part: _Part) -> None:
        here = self.parts.get(part.siblings)
        both = part if here is None else _together([here, part])
        self.parts[part.siblings] = both
        self.tokens += both.tokens - (0 if here is None else here.tokens)
        self.cost += both.cost - (0.0 if here is None else here.cost)


def _wall(rows: Sequence[_Load], ranks: int) -> float:
    """Return the time that the ranks take, given that they wait for each other in every pass (see `passes`)."""
    return sum(sorted((row.cost for row in rows), reverse=True)[::ranks])


def _singles(family: Family, join_cost: float) -> list[_Part]:
    siblings = _Siblings(family.prefix, _cost_of(family.prefix, 0), join_cost)
    parts = []
    for member in family.members:
        own = len(member.token_ids) - siblings.prefix
        own_cost = _cost_of(own, siblings.prefix)
        parts.append(_Part(siblings, (member,), own, own_cost, *siblings.takes(1, own, own_cost)))
    return parts


def _together(parts: Sequence[_Part]) -> _Part:
    siblings, members = parts[0].siblings, tuple(member for part in parts for member in part.members)
    own, own_cost = sum(part.own for part in parts), sum(part.own_cost for part in parts)
    return _Part(siblings, members, own, own_cost, *siblings.takes(len(members), own, own_cost))


def _blocks(singles: Sequence[_Part], budget: int) -> list[list[_Part]]:
    """Divide the members of a family into blocks that each fit the budget, together with one copy of the prefix."""
    rows = _first_fit([single.own for single in singles], budget - singles[0].siblings.prefix)
    return [[singles[i] for i in row] for row in rows]


def _parts(blocks: Sequence[Sequence[_Part]], most: float) -> list[_Part]:
    """Return one part per block, or several if a block costs more than `most` without its prefix.

    If a part does not share its prefix, its members become parts of their own.
    """
    parts: list[_Part] = []
    for block in blocks:
        cost = sum(single.own_cost for single in block)
        for cut in _cut(block, math.ceil(cost / most)) if cost > most else [block]:
            part = _together(cut)
            parts.extend([part] if part.shares else cut)
    return parts


def _cut(singles: Sequence[_Part], count: int) -> list[Sequence[_Part]]:
    """Divide the parts into at most `count` lists of similar cost."""
    lists: list[list[_Part]] = [[] for _ in range(min(count, len(singles)))]
    costs = [0.0] * len(lists)
    for single in sorted(singles, key=lambda single: -single.own_cost):
        cheapest = costs.index(min(costs))
        lists[cheapest].append(single)
        costs[cheapest] += single.own_cost
    return [cut for cut in lists if cut]


def _even(parts: Sequence[_Part], budget: int, ranks: int) -> list[_Load]:
    """Fill rows of similar cost, in about the fewest passes that hold all parts. Empty rows are left out."""
    ordered = sorted(parts, key=lambda part: -part.cost)
    fewest = -(-len(_first_fit([part.tokens for part in parts], budget)) // ranks)
    filled = (_fill(ordered, budget, times * ranks) for times in itertools.count(fewest))
    return [row for row in next(rows for rows in filled if rows is not None) if row.parts]


def _fill(parts: Sequence[_Part], budget: int, count: int) -> list[_Load] | None:
    """Put every part into the cheapest row that has room. Return None if a part fits nowhere.

    If the cheapest row with members of the same family would then cost less, the part goes into that row instead.
    """
    rows = [_Load() for _ in range(count)]
    by_cost = [(0.0, i) for i in range(count)]
    homes: dict[_Siblings, set[int]] = {}
    for part in parts:
        home = homes.setdefault(part.siblings, set())
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
