"""Meaningless batches on which a trainer compiles its layers before the first real step.

They are as large as the rows of real steps. If the compiler sees short rows first, it optimizes its reductions for
short rows, and these stay slow for long rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.types import Batch, Int32Array

LONGEST = 256
"""The largest number of tokens in a sequence."""
SHARES = (1.0, 0.75)
"""The size of each batch as a fraction of a full row. Two sizes show the compiler that lengths vary."""


def warm_up_batches(vocabulary: int, row_tokens: int) -> Iterator[Batch]:
    """Yield batches of one row, in which every token except the first of each sequence is trained."""
    for share in SHARES:
        tokens = max(4, int(share * row_tokens))
        count = -(-tokens // LONGEST)
        yield _batch(np.full(count, tokens // count, np.int32), vocabulary)


def _batch(lengths: Int32Array, vocabulary: int) -> Batch:
    total = int(lengths.sum())
    trained = np.ones(total, np.bool_)
    trained[lengths.cumsum() - lengths] = False
    return Batch(
        step=0,
        version=0,
        objective="imitation",
        token_ids=(np.arange(total) % vocabulary).astype(np.int32),
        lengths=lengths,
        groups=np.arange(len(lengths), dtype=np.int32),
        trained=trained,
        logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        advantages=np.zeros(total, np.float32),
        weights=np.full(total, 1 / total, np.float32),
    )
