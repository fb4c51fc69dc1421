"""The canary: a fixed sequence that trainer and engine must score alike under the same weights.

A digest proves bytes; the canary proves that the engine computes with them. How far two programs' arithmetic may differ
depends on dtype and device, so unless a tolerance is given an engine finds its own from the error of the first version,
whose bytes are proved.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.delivery.base import Canary
from headrace.errors import DeliveryError
from headrace.types import Float32Array, Int32Array

Score = Callable[[Int32Array], Float32Array]
"""Gives the log-probabilities of tokens 1..n, each given those before it."""
SMALLEST_TOLERANCE = 1e-3
"""Rounding of float32 stays well below."""
LARGEST_FIRST_ERROR = 0.5
"""Arithmetic that differs by more is another model's."""
HEADROOM = 4.0
"""How much larger than the first error later ones may be."""


def canary_sequence(vocabulary: int, length: int) -> Int32Array:
    """A fixed, arbitrary sequence of token ids: the same in every run of a model."""
    return np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)


def score_canary(version: int, token_ids: Int32Array, tolerance: float | None, score: Score) -> Canary:
    """The canary of a version, scored by its trainer, whose log-probabilities engines can be compared with."""
    logprobs = np.asarray(score(token_ids), np.float32)
    if logprobs.shape != (len(token_ids) - 1,):
        raise DeliveryError(f"the canary of version {version} has log-probabilities of shape {logprobs.shape}")
    if not np.isfinite(logprobs).all():
        raise DeliveryError(f"the canary of version {version} has log-probabilities that are not finite")
    return Canary(token_ids=token_ids, logprobs=logprobs, tolerance=tolerance)


def canary_error(canary: Canary, logprobs: Float32Array) -> float:
    """The mean absolute difference from the trainer's log-probabilities; infinite if they cannot be compared.

    The mean: in 16 bits one unlikely token may be off by half a nat under the right weights, and wrong ones move all.
    """
    scored = np.asarray(logprobs, np.float32)
    if scored.shape != canary.logprobs.shape or not np.isfinite(scored).all():
        return float("inf")
    return float(np.abs(scored - canary.logprobs).mean()) if len(scored) else 0.0


class Tolerance:
    """One engine's limit for canary errors. It grows with the log-probabilities, as rounding does."""

    def __init__(self) -> None:
        self._found: float | None = None
        """For log-probabilities of size 1."""

    def of(self, canary: Canary) -> float:
        """The limit that holds for this version's canary."""
        if canary.tolerance is not None:
            return canary.tolerance
        return LARGEST_FIRST_ERROR if self._found is None else max(SMALLEST_TOLERANCE, self._found * _size(canary))

    def proved(self, canary: Canary, error: float) -> None:
        """This version was proved with this error; the first one calibrates the limit."""
        if self._found is None:
            self._found = HEADROOM * error / _size(canary)


def _size(canary: Canary) -> float:
    return max(1.0, float(np.abs(canary.logprobs).mean())) if len(canary.logprobs) else 1.0
