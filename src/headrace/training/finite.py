"""The numbers of a batch that reach a loss: all of them must be finite, or nothing is trained.

A number that is not finite would not stop a step by itself: most losses limit ratios, so one token that nobody could
have sampled would only weaken the gradient of all the others. This runs on the host, before anything is computed.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError
from headrace.types import Batch


def check_numbers(batch: Batch) -> None:
    """Raise `HeadraceError` if a number of a trained token is not finite. Other tokens' numbers have no meaning."""
    if not (math.isfinite(batch.temperature) and batch.temperature > 0):
        raise HeadraceError(f"step {batch.step}: the batch has the temperature {batch.temperature}")
    places = np.flatnonzero(batch.trained)
    for name, values in _numbers(batch):
        mine = values[places]
        good = np.isfinite(mine)
        if not good.all():
            wrong = int(np.argmin(good.reshape(len(places), -1).all(axis=1)))
            value = mine[wrong].reshape(-1)[np.argmin(good[wrong].reshape(-1))]
            sequence = int(np.searchsorted(np.cumsum(batch.lengths), places[wrong], side="right"))
            token = places[wrong] - int(batch.lengths[:sequence].sum())
            raise HeadraceError(
                f"step {batch.step}: the {name} of token {token} of sequence {sequence} is {value}, which is no number "
                "to train on"
            )


def _numbers(batch: Batch) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the numbers of each kind, [T] or [T, k], with their name."""
    yield "recorded log-probability", batch.logprobs
    yield "advantage", batch.advantages
    yield "weight", batch.weights
    if batch.temperatures is not None:
        # No token is sampled at temperature 0 or below.
        yield "temperature", np.where(batch.temperatures > 0, batch.temperatures, np.nan)
    if batch.rewards is not None:
        yield "reward", batch.rewards
    if batch.teacher is not None:
        yield "teacher's log-probability", batch.teacher.logprobs
        yield "teacher's log-probability of its likeliest tokens", batch.teacher.top_logprobs
        # A teacher may give all other tokens no probability at all.
        yield "teacher's tail", np.where(np.isneginf(batch.teacher.tails), 0.0, batch.teacher.tails)
