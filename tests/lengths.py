"""Lengths of completions for the fake engine."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headrace.engines.base import Request
from headrace.engines.fake_policy import stable_hash


def lognormal_lengths(median: float, sigma: float = 0.6, seed: int = 0) -> Callable[[Request], int]:
    """Return a function that draws completion lengths with a long tail, each from the request's own seed."""

    def length(request: Request) -> int:
        rng = np.random.default_rng(stable_hash("length", seed, request.sampling.seed))
        return max(1, round(median * math.exp(sigma * rng.standard_normal())))

    return length
