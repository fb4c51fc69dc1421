"""What a trainer compiles itself on: one row a batch, as long as those of real steps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.training.layers import SHARES, warm_up_batches
from headrace.training.rows import plan


@given(st.integers(1, 40_000))
def test_rows_are_as_long_as_real_ones(row_tokens):
    lengths = []
    for share, batch in zip(SHARES, warm_up_batches(61, row_tokens), strict=True):
        wanted = max(4, int(share * row_tokens))
        (row,) = plan(batch, micro_batch_tokens=row_tokens, share_prefixes=True)
        # A sequence's last token is a target only, and what does not divide evenly is left out.
        assert wanted - 2 * len(batch.lengths) < len(row) < wanted
        assert batch.trained_tokens == len(row)
        lengths.append(len(row))
    assert row_tokens < 8 or lengths[0] != lengths[1]
