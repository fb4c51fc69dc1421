"""Rows for several ranks: everything once, as many passes for each, of like cost, and no slower for a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import random_batch

from headrace.training.rows import PAIRS_PER_TOKEN, MicroBatch, passes, plan, plan_scoring
from headrace.types import Batch


def lognormal_batch(seed: int, *, groups: int, size: int, prompt: int = 64, mean: int = 256, alike: bool = True):
    """Groups of answers of very different lengths, whose prompts are alike within a group or have nothing in common."""
    rng = np.random.default_rng(seed)
    tokens, trained, lengths = [], [], []
    for _ in range(groups):
        shared = rng.integers(3, 1000, prompt)
        for answer in range(size):
            length = int(np.clip(rng.lognormal(np.log(mean) - 0.5, 1), 2, 8 * mean))
            first = [shared] if alike else [[answer], rng.integers(3, 1000, prompt - 1)]
            tokens += [*first, rng.integers(3, 1000, length)]
            trained.append(np.arange(prompt + length) >= prompt)
            lengths.append(prompt + length)
    zeros = np.zeros(sum(lengths), np.float32)
    return Batch(
        step=1,
        version=1,
        token_ids=np.concatenate(tokens).astype(np.int32),
        lengths=np.array(lengths, np.int32),
        groups=np.repeat(np.arange(groups, dtype=np.int32), size),
        trained=np.concatenate(trained),
        logprobs=zeros,
        versions=zeros.astype(np.int32),
        advantages=zeros,
        weights=zeros,
    )


def wall(rows: Sequence[MicroBatch], ranks: int) -> float:
    """What ranks take that wait for each other in every pass: the costliest row of each."""
    per_rank = [[row.cost for row, _ in passes(rows, rank, ranks)] for rank in range(ranks)]
    return sum(max(together) for together in zip(*per_rank, strict=True))


def ideal(batch: Batch, ranks: int, join_cost: float) -> float:
    """Whole families spread over ranks as if they could be cut anywhere for nothing, or the costliest sequence."""
    [row] = plan(batch, micro_batch_tokens=10**9, share_prefixes=True, join_cost=join_cost)
    alone = plan(batch, micro_batch_tokens=1, share_prefixes=False)
    return max(row.cost / ranks, *(single.cost for single in alone))


@st.composite
def uneven_batches(draw):
    """Short and long answers behind short and long prompts: sharing pays for some of a family and not for all."""
    return lognormal_batch(
        draw(st.integers(0, 1000)),
        groups=draw(st.integers(1, 4)),
        size=draw(st.integers(1, 8)),
        prompt=draw(st.integers(1, 20)),
        mean=draw(st.integers(4, 40)),
        alike=draw(st.sampled_from([True, True, True, False])),
    )


@given(uneven_batches(), st.integers(2, 5), st.integers(1, 200), st.sampled_from([0.0, 0.25, 0.4]))
@settings(max_examples=200, deadline=None)
def test_every_trained_token_counts_once_and_sharing_is_never_slower(batch, ranks, budget, join_cost):
    def rows_of(share: bool) -> list[MicroBatch]:
        return plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks, join_cost=join_cost)

    for rows in (rows_of(True), rows_of(False)):
        for row in rows:
            assert len(row) <= budget or len(set(row.sequences.tolist())) == 1
        per_rank = [passes(rows, rank, ranks) for rank in range(ranks)]
        assert len({len(mine) for mine in per_rank}) == 1
        counted = np.concatenate([row.sources for mine in per_rank for row, counts in mine if counts])
        assert sorted(counted) == np.flatnonzero(batch.trained).tolist()
    assert wall(rows_of(True), ranks) <= wall(rows_of(False), ranks) * (1 + 1e-9)
    first, second = rows_of(True), rows_of(True)
    assert [row.segments for row in first] == [row.segments for row in second]
    assert [row.sources.tolist() for row in first] == [row.sources.tolist() for row in second]


@pytest.mark.parametrize(("groups", "size", "ranks", "prompt", "budget"), [(2, 6, 3, 16, 150), (3, 8, 4, 8, 60)])
@pytest.mark.parametrize("share", [True, False])
def test_a_tight_budget_holds_where_sharing_pays_for_some_members_only(groups, size, ranks, prompt, budget, share):
    for seed in range(40):
        batch = lognormal_batch(seed, groups=groups, size=size, prompt=prompt, mean=prompt * 5 // 2)
        rows = plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks, join_cost=0.4)
        assert all(len(row) <= budget or len(set(row.sequences.tolist())) == 1 for row in rows)


@given(st.integers(0, 50), st.integers(1, 6), st.integers(2, 5), st.integers(8, 80), st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_take_at_most_a_pass_more_than_the_fewest_rows_need(seed, groups, ranks, budget, share):
    batch = random_batch(seed, groups=groups)
    rows = plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks)
    alone = plan(batch, micro_batch_tokens=budget, share_prefixes=False)
    assert -(-len(rows) // ranks) <= -(-len(alone) // ranks) + 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("join_cost", [0.0, 0.25])
@pytest.mark.parametrize(
    ("groups", "size", "ranks", "bound"),
    [
        (1, 8, 2, 1.1),
        (1, 8, 4, 1.25),
        (2, 16, 4, 1.06),
        (2, 16, 8, 1.03),
        (4, 8, 8, 1.01),
        (4, 16, 8, 1.08),
        (8, 8, 8, 1.08),
        (16, 8, 4, 1.06),
        (16, 8, 8, 1.08),
    ],
)
def test_families_are_cut_until_ranks_are_even(groups, size, ranks, bound, join_cost, seed):
    batch = lognormal_batch(seed, groups=groups, size=size)
    shared, unshared = (
        plan(batch, micro_batch_tokens=8192, share_prefixes=share, ranks=ranks, join_cost=join_cost)
        for share in (True, False)
    )
    assert wall(shared, ranks) <= wall(unshared, ranks) * (1 + 1e-9)
    assert wall(shared, ranks) <= bound * ideal(batch, ranks, join_cost)


@pytest.mark.parametrize(("groups", "size", "ranks", "bound"), [(1, 8, 4, 0.9), (2, 16, 4, 0.4), (8, 8, 8, 0.42)])
def test_long_prefixes_are_repeated_only_where_that_is_faster(groups, size, ranks, bound):
    walls = np.zeros(2)
    for seed in range(5):
        batch = lognormal_batch(seed, groups=groups, size=size, prompt=1000)
        for i, share in enumerate((True, False)):
            walls[i] += wall(plan(batch, micro_batch_tokens=8192, share_prefixes=share, ranks=ranks), ranks)
    assert walls[0] <= bound * walls[1]


@pytest.mark.parametrize("join_cost", [0.0, 0.25])
def test_members_that_share_nothing_are_apart(join_cost):
    batch = lognormal_batch(0, groups=1, size=8, alike=False)
    settings = {"micro_batch_tokens": 8192, "join_cost": join_cost}
    for ranks in (1, 4):
        shared, unshared = (plan(batch, share_prefixes=share, ranks=ranks, **settings) for share in (True, False))
        assert [row.segments for row in shared] == [row.segments for row in unshared]
        assert len(shared) == ranks


def test_one_rank_takes_the_fewest_rows():
    batch = lognormal_batch(0, groups=16, size=8)
    rows = plan(batch, micro_batch_tokens=8192, share_prefixes=True)
    assert len(rows) == -(-sum(len(row) for row in rows) // 8192)


def test_one_row_of_work_becomes_a_row_for_each_rank():
    batch = random_batch(3, groups=8)
    assert len(plan(batch, micro_batch_tokens=4096, share_prefixes=True)) == 1
    rows = plan(batch, micro_batch_tokens=4096, share_prefixes=True, ranks=4)
    assert len(rows) == 4
    costs = [row.cost for row in rows]
    assert max(costs) < 1.2 * min(costs)
    assert all(counts for rank in range(4) for _, counts in passes(rows, rank, 4))


def test_where_rows_run_out_a_rank_computes_for_nothing():
    rows = plan(random_batch(3, groups=3, size=1), micro_batch_tokens=4096, share_prefixes=True, ranks=4)
    assert [counts for rank in range(4) for _, counts in passes(rows, rank, 4)] == [True, True, True, False]
    assert passes([], 0, 4) == []


def test_cost_counts_tokens_pairs_and_joining():
    row = plan_scoring(np.arange(3, 104, dtype=np.int32))
    assert row.cost == pytest.approx(100 + 100 * 100 / 2 / PAIRS_PER_TOKEN)
    for join_cost in (0.0, 0.01):
        batch = random_batch(1, groups=1)
        [shared] = plan(batch, micro_batch_tokens=4096, share_prefixes=True, join_cost=join_cost)
        prefix = shared.segments[0].length
        own = [segment.length for segment in shared.segments[1:]]
        pairs = prefix**2 / 2 + sum(n * (n / 2 + prefix) for n in own)
        assert shared.cost == pytest.approx(prefix + (1 + join_cost) * sum(own) + pairs / PAIRS_PER_TOKEN)
