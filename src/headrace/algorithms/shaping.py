"""Shaping of rewards by length, before advantages are computed: pure functions of (reward, length), without torch.

The recorded rewards stay as they were judged. Only the advantages see the shaped rewards.
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
    """Return the rewards minus the costs of length: `overlong`, and `length_penalty` x length / max_tokens."""
    cost = overlong(lengths, max_tokens=max_tokens, buffer=overlong_buffer) * overlong_penalty
    return np.asarray(rewards - cost - length_penalty * (lengths / max_tokens), np.float64)


def overlong(lengths: Int32Array, *, max_tokens: int, buffer: int) -> FloatArray:
    """Return DAPO's soft penalty: 0 up to max_tokens - buffer, then rising linearly to 1 at max_tokens.

    Buffer 0 is off.
    """
    if buffer == 0:
        return np.zeros(len(lengths), np.float64)
    return np.asarray(np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0), np.float64)
