"""Batches that mean nothing: what a trainer compiles itself on, before anybody waits for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.types import Batch

LENGTHS = ((61, 40, 23), (128, 96, 50))
"""Of the sequences of each batch; no two rows are of one length, and the compiler sees that lengths vary."""


def warm_up_batches(vocabulary: int) -> Iterator[Batch]:
    """Small batches in which all but the first tokens of each sequence are trained."""
    for lengths in LENGTHS:
        total = sum(lengths)
        trained = np.ones(total, np.bool_)
        trained[np.cumsum((0, *lengths[:-1]))] = False
        yield Batch(
            step=0,
            version=0,
            objective="imitation",
            token_ids=(np.arange(total) % vocabulary).astype(np.int32),
            lengths=np.array(lengths, np.int32),
            groups=np.arange(len(lengths), dtype=np.int32),
            trained=trained,
            logprobs=np.zeros(total, np.float32),
            versions=np.zeros(total, np.int32),
            advantages=np.zeros(total, np.float32),
            weights=np.full(total, 1 / total, np.float32),
        )
