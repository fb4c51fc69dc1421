from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_batch

from headrace.training.rows import MicroBatch, plan, plan_scoring
from headrace.types import Batch


@st.composite
def batches(draw):
    """Any mixture of groups, few distinct tokens (so that prefixes agree by chance too), gaps, untrained sequences."""
    tokens, trained, lengths, groups = [], [], [], []
    token = st.integers(0, 2)
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            rest = draw(st.lists(st.tuples(token, st.booleans()), min_size=0, max_size=6))
            tokens += prompt + [t for t, _ in rest]
            trained += [False] * len(prompt) + [flag for _, flag in rest]
            lengths.append(len(prompt) + len(rest))
            groups.append(group)
    order = draw(st.permutations(range(len(lengths))))
    starts = np.cumsum([0, *lengths[:-1]])
    index = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in order])
    zeros = np.zeros(len(tokens), np.float32)
    return Batch(
        step=1,
        version=1,
        token_ids=np.array(tokens, np.int32)[index],
        lengths=np.array([lengths[i] for i in order], np.int32),
        groups=np.array([groups[i] for i in order], np.int32),
        trained=np.array(trained, bool)[index],
        logprobs=zeros,
        versions=zeros.astype(np.int32),
        advantages=zeros,
        weights=zeros,
    )


def places_before(row: MicroBatch, predictor: int) -> list[int]:
    """The places that a place of the row may attend to, itself last, told by the segments alone."""
    [segment] = [s for s in row.segments if s.start <= predictor < s.end]
    places = list(range(segment.start, predictor + 1))
    if segment.prefix is not None:
        prefix = row.segments[segment.prefix]
        assert prefix.prefix is None
        places = list(range(prefix.start, prefix.end)) + places
    return places


def seen_by(row: MicroBatch, predictor: int) -> tuple[list[int], list[int]]:
    """The tokens and positions there."""
    places = places_before(row, predictor)
    return row.token_ids[places].tolist(), row.position_ids[places].tolist()


def contexts(batch: Batch) -> dict[int, list[int]]:
    """For every trained token its place in the batch and all that comes before it in its own sequence."""
    found = {}
    start = 0
    for length in batch.lengths:
        for place in range(start, start + int(length)):
            if batch.trained[place]:
                found[place] = batch.token_ids[start:place].tolist()
        start += int(length)
    return found


@given(batches(), st.integers(1, 40), st.booleans(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_a_sequence_is_never_cut_and_tokens_know_theirs(batch, budget, share, ranks):
    ends = np.cumsum(batch.lengths)
    owner = np.searchsorted(ends, np.arange(len(batch.token_ids)), side="right")
    seen = set()
    for row in plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks):
        assert len(row.sequences) == len(row.sources)
        numbers = sorted(set(row.sequences.tolist()))
        assert numbers == list(range(len(numbers)))
        for number in numbers:
            sources = row.sources[row.sequences == number]
            [sequence] = set(owner[sources].tolist())
            assert sequence not in seen
            seen.add(sequence)
            assert sources.tolist() == np.flatnonzero(batch.trained & (owner == sequence)).tolist()


@given(batches(), st.integers(1, 40), st.booleans(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_every_trained_token_is_read_once_behind_its_own_context(batch, budget, share, ranks):
    rows = plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks)
    found = {}
    for row in rows:
        assert len(row.targets) == len(row.predictors) == len(row.sources) > 0
        for predictor, target, source in zip(row.predictors, row.targets, row.sources, strict=True):
            assert int(source) not in found
            assert target == batch.token_ids[source]
            tokens, positions = seen_by(row, int(predictor))
            assert positions == list(range(len(tokens)))
            found[int(source)] = tokens
    assert found == contexts(batch)


@given(batches(), st.integers(1, 40), st.booleans(), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_every_pass_has_the_experts_that_were_recorded_for_its_tokens(batch, budget, share, experts, ranks):
    """Whatever is shared: the record of a token is of the pass over the token before it."""
    rng = np.random.default_rng(len(batch.token_ids))
    # Few different ones, so that first tokens of a group agree by chance too.
    batch.routing = rng.integers(0, experts, (len(batch.token_ids), 2, 1)).astype(np.int16)
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    for row in plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks):
        assert row.routing.shape == (len(row), 2, 1)
        for predictor, source in zip(row.predictors, row.sources, strict=True):
            found = row.routing[places_before(row, int(predictor))]
            assert found.tolist() == batch.routing[starts[source] + 1 : source + 1].tolist()


@given(batches(), st.integers(1, 40), st.booleans(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_rows_keep_the_budget_and_are_covered_by_their_segments(batch, budget, share, ranks):
    longest = max(batch.lengths)
    for row in plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks):
        answers = [s for i, s in enumerate(row.segments) if not any(other.prefix == i for other in row.segments)]
        assert len(row) <= budget or (len(answers) == 1 and len(row) <= longest)
        assert [s.start for s in row.segments] == np.cumsum([0, *(s.length for s in row.segments[:-1])]).tolist()
        assert row.segments[-1].end == len(row) == len(row.position_ids)
        if not share:
            assert all(s.prefix is None for s in row.segments)


@given(batches(), st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_sharing_never_costs_tokens_and_plans_repeat(batch, budget):
    def cost(share):
        return sum(len(row) for row in plan(batch, micro_batch_tokens=budget, share_prefixes=share))

    assert cost(True) <= cost(False) <= len(batch.token_ids)
    first, second = (plan(batch, micro_batch_tokens=budget, share_prefixes=True) for _ in range(2))
    assert [row.segments for row in first] == [row.segments for row in second]
    assert [row.token_ids.tolist() for row in first] == [row.token_ids.tolist() for row in second]


@given(batches(), st.integers(1, 40), st.sampled_from([0.25, 1.0, 100.0]))
@settings(max_examples=50, deadline=None)
def test_prefixes_that_do_not_pay_are_not_shared(batch, budget, cost):
    rows = plan(batch, micro_batch_tokens=budget, share_prefixes=True, join_cost=cost)
    assert sorted(np.concatenate([row.sources for row in rows]).tolist() if rows else []) == sorted(contexts(batch))
    # No group here saves 100 times what it has of its own, unless that is nothing.
    assert cost < 100 or not any(s.length for row in rows for s in row.segments if s.prefix is not None)


def test_sharing_pays_by_hand():
    # Two answers of 8 tokens, of which 7 are computed, save their 4 common tokens once and are joined 14 times.
    tokens = np.array([1, 2, 3, 4, *range(5, 13), 1, 2, 3, 4, *range(15, 23)], np.int32)
    zeros = np.zeros(24, np.float32)
    batch = Batch(
        step=1,
        version=1,
        token_ids=tokens,
        lengths=np.array([12, 12], np.int32),
        groups=np.array([0, 0], np.int32),
        trained=np.tile(np.arange(12) >= 4, 2),
        logprobs=zeros,
        versions=zeros.astype(np.int32),
        advantages=zeros,
        weights=zeros,
    )
    for cost, computed in ((4 / 14, 18), (0.29, 22)):
        (row,) = plan(batch, micro_batch_tokens=40, share_prefixes=True, join_cost=cost)
        assert len(row) == computed


def test_a_group_by_hand():
    batch = Batch(
        step=1,
        version=1,
        token_ids=np.array([5, 6, 7, 1, 2, 5, 6, 7, 3, 5, 6, 8, 4], np.int32),
        lengths=np.array([5, 4, 4], np.int32),
        groups=np.array([0, 0, 0], np.int32),
        trained=np.array([0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1], bool),
        logprobs=np.zeros(13, np.float32),
        versions=np.zeros(13, np.int32),
        advantages=np.zeros(13, np.float32),
        weights=np.zeros(13, np.float32),
    )
    [row] = plan(batch, micro_batch_tokens=100, share_prefixes=True)
    # Prefix 5 6; then 7 1 (the 2 is only a target), 7, and 8.
    assert row.token_ids.tolist() == [5, 6, 7, 1, 7, 8]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 2, 2]
    assert row.predictors.tolist() == [2, 3, 4, 5]
    assert row.targets.tolist() == [1, 2, 3, 4]
    assert row.sources.tolist() == [3, 4, 8, 12]
    # Two that agree up to their answers read their first tokens from one place.
    first, second = plan(batch, micro_batch_tokens=5, share_prefixes=True)
    assert [len(first), len(second)] == [4, 3]
    assert first.predictors.tolist() == [2, 3, 2]
    assert [s.length for s in first.segments] == [3, 1, 0]
    assert second.token_ids.tolist() == [5, 6, 8]


def test_short_groups_fill_rows():
    batch = random_batch(0, groups=12, size=3)
    rows = plan(batch, micro_batch_tokens=100, share_prefixes=True)
    total = sum(len(row) for row in rows)
    assert len(rows) <= -(-total // 100) + 1


def test_the_first_token_cannot_be_trained():
    batch = random_batch(0)
    batch.trained[0] = True
    with pytest.raises(ValueError, match="nothing before it"):
        plan(batch, micro_batch_tokens=100, share_prefixes=True)


def test_scoring_reads_every_token_but_the_first():
    row = plan_scoring(np.array([4, 5, 6], np.int32))
    assert (row.token_ids.tolist(), row.targets.tolist(), row.predictors.tolist()) == ([4, 5], [5, 6], [0, 1])
