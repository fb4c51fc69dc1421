"""The canary is a fixed token sequence that the trainer and an engine must score alike under the same weights.

A digest proves the bytes; the canary proves that the engine computes with them. How much the results of two programs
may differ depends on dtype and device. If no tolerance is configured, an engine therefore calibrates its own from the
error of the first version, whose bytes are already proved by digest.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.delivery.base import Canary
from headrace.errors import DeliveryError
from headrace.types import Float32Array, Int32Array

Score = Callable[[Int32Array], Float32Array]
"""A function that returns the log-probabilities of tokens 1..n, each given the tokens before it."""
SMALLEST_TOLERANCE = 1e-3
"""The smallest calibrated tolerance. Rounding errors of float32 stay well below it."""
LARGEST_FIRST_ERROR = 0.5
"""The largest error of the first version. A larger error means that the engine runs another model."""
HEADROOM = 4.0
"""How many times larger than the first error later errors may be."""


def canary_sequence(vocabulary: int, length: int) -> Int32Array:
    """Return a fixed, arbitrary sequence of token ids, the same in every run of a model."""
    return np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)


def score_canary(version: int, token_ids: Int32Array, tolerance: float | None, score: Score) -> Canary:
    """Score the canary of a version in the trainer; engines are compared with these log-probabilities.

    Raises `DeliveryError` if the log-probabilities have the wrong shape or are not finite.
    """
    logprobs = np.asarray(score(token_ids), np.float32)
    if logprobs.shape != (len(token_ids) - 1,):
        raise DeliveryError(f"the canary of version {version} has log-probabilities of shape {logprobs.shape}")
    if not np.isfinite(logprobs).all():
        raise DeliveryError(f"the canary of version {version} has log-probabilities that are not finite")
    return Canary(token_ids=token_ids, logprobs=logprobs, tolerance=tolerance)


def canary_error(canary: Canary, logprobs: Float32Array) -> float:
    """Return the mean absolute difference from the trainer's log-probabilities; infinite if they cannot be compared.

    The mean is used because in 16 bits one unlikely token may be off by half a nat even under the right weights, while
    wrong weights change all tokens.
    """
    scored = np.asarray(logprobs, np.float32)
    if scored.shape != canary.logprobs.shape or not np.isfinite(scored).all():
        return float("inf")
    return float(np.abs(scored - canary.logprobs).mean()) if len(scored) else 0.0


class Tolerance:
    """One engine's limit for canary errors. It grows with the size of the log-probabilities, as rounding does."""

    def __init__(self) -> None:
        self._found: float | None = None
        """The calibrated limit for log-probabilities of size 1."""

    def of(self, canary: Canary) -> float:
        """Return the limit for this version's canary."""
        if canary.tolerance is not None:
            return canary.tolerance
        return LARGEST_FIRST_ERROR if self._found is None else max(SMALLEST_TOLERANCE, self._found * _size(canary))

    def proved(self, canary: Canary, error: float) -> None:
        """Record that a version was proved with this error; the first proved version calibrates the limit."""
        if self._found is None:
            self._found = HEADROOM * error / _size(canary)


def _size(canary: Canary) -> float:
    return max(1.0, float(np.abs(canary.logprobs).mean())) if len(canary.logprobs) else 1.0
