"""Batches that mean nothing: what a trainer compiles itself on, before anybody waits for it.

They are as large as the rows of real steps: a compiler that sees short rows first cuts its sums for those, and they
stay slow in long ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.types import Batch, Int32Array

LONGEST = 256
"""Tokens of a sequence, at most."""
SHARES = (1.0, 0.75)
"""Of a full row, that each batch has: the compiler sees that lengths vary."""


def warm_up_batches(vocabulary: int, row_tokens: int) -> Iterator[Batch]:
    """Batches of one row in which all but the first tokens of each sequence are trained."""
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
