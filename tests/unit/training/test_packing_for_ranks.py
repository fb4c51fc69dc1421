"""Rows for several ranks: everything once, as many passes for each, of like cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_models import random_batch

from headrace.training.packing import PAIRS_PER_TOKEN, passes, plan, plan_scoring


@given(st.integers(0, 50), st.integers(1, 6), st.integers(2, 5), st.integers(8, 80), st.booleans())
def test_every_trained_token_counts_once_over_all_ranks(seed, groups, ranks, budget, share):
    batch = random_batch(seed, groups=groups)
    rows = plan(batch, micro_batch_tokens=budget, share_prefixes=share, ranks=ranks)
    longest = max(len(row) for row in plan(batch, micro_batch_tokens=1, share_prefixes=False))
    assert all(len(row) <= max(budget, longest) for row in rows)
    per_rank = [passes(rows, rank, ranks) for rank in range(ranks)]
    assert len({len(mine) for mine in per_rank}) == 1
    counted = np.concatenate([row.sources for mine in per_rank for row, counts in mine if counts])
    assert sorted(counted) == np.flatnonzero(batch.trained).tolist()
    alone = plan(batch, micro_batch_tokens=budget, share_prefixes=share)
    assert len(rows) < len(alone) + ranks or len(rows) % ranks == 0


def test_one_row_of_work_becomes_a_row_for_each_rank():
    batch = random_batch(3, groups=8)
    assert len(plan(batch, micro_batch_tokens=4096, share_prefixes=True)) == 1
    rows = plan(batch, micro_batch_tokens=4096, share_prefixes=True, ranks=4)
    assert len(rows) == 4
    costs = [row.cost for row in rows]
    assert max(costs) < 1.35 * min(costs)
    assert all(counts for rank in range(4) for _, counts in passes(rows, rank, 4))


def test_where_rows_run_out_a_rank_computes_for_nothing():
    rows = plan(random_batch(3, groups=3), micro_batch_tokens=4096, share_prefixes=True, ranks=4)
    assert [counts for rank in range(4) for _, counts in passes(rows, rank, 4)] == [True, True, True, False]
    assert passes([], 0, 4) == []


def test_cost_counts_tokens_and_pairs():
    row = plan_scoring(np.arange(3, 104, dtype=np.int32))
    assert row.cost == pytest.approx(100 + 100 * 100 / 2 / PAIRS_PER_TOKEN)
    shared = plan(random_batch(1, groups=1), micro_batch_tokens=4096, share_prefixes=True)[0]
    prefix = shared.segments[0].length
    own = [segment.length for segment in shared.segments[1:]]
    pairs = prefix**2 / 2 + sum(n * (n / 2 + prefix) for n in own)
    assert shared.cost == pytest.approx(prefix + sum(own) + pairs / PAIRS_PER_TOKEN)
