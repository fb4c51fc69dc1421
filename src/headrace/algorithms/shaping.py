"""Rewards shaped by length, before advantages are taken: pure functions of (reward, length). No torch here.

The recorded rewards stay as they were judged; only what the advantages see is shaped.
"""

from __future__ import annotations

import numpy as np

from headrace.algorithms.advantages import FloatArray
from headrace.types import Int32Array


def shaped(
    rewards: FloatArray,
    lengths: Int32Array,
    *,
    max_tokens: int,
    overlong_buffer: int = 0,
    overlong_penalty: float = 1.0,
    length_penalty: float = 0.0,
) -> FloatArray:
    """The rewards less what their lengths cost: `overlong` and `length_penalty` x length / max_tokens."""
    cost = overlong(lengths, max_tokens=max_tokens, buffer=overlong_buffer) * overlong_penalty
    return np.asarray(rewards - cost - length_penalty * (lengths / max_tokens), np.float64)


def overlong(lengths: Int32Array, *, max_tokens: int, buffer: int) -> FloatArray:
    """DAPO's soft punishment: 0 up to max_tokens - buffer, then rising evenly to 1 at max_tokens; 0 is off."""
    if buffer == 0:
        return np.zeros(len(lengths), np.float64)
    return np.asarray(np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0), np.float64)
