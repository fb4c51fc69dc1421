"""From a group's rewards to its advantages: pure functions, one per estimator. No torch here.

Each estimator is unchanged when a constant is added to every reward, follows a reordering of the rollouts, and sums to
zero over the group: a group whose rollouts all earned the same teaches nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
AdvantageFunction = Callable[[FloatArray], FloatArray]

EPSILON = 1e-6
"""Added to the standard deviation of `grpo`: small beside any real spread of rewards, large beside rounding."""


def grpo(rewards: FloatArray) -> FloatArray:
    """(R - mean) / (std + EPSILON) with the population's standard deviation; zeros where all rewards are equal."""
    centred = dr_grpo(rewards)
    return centred / (centred.std() + EPSILON) if len(centred) else centred


def dr_grpo(rewards: FloatArray) -> FloatArray:
    """R - mean: no division by the spread, so easy and hard prompts keep their scale."""
    if len(rewards) == 0 or bool(np.all(rewards == rewards[0])):
        # The mean of equal numbers may be off by rounding, and grpo would blow that up.
        return np.zeros(len(rewards), np.float64)
    return np.asarray(rewards - rewards.mean(), np.float64)


def rloo(rewards: FloatArray) -> FloatArray:
    """R - mean of the others; a group of one has no others and gets zero."""
    n = len(rewards)
    return dr_grpo(rewards) * (n / (n - 1)) if n > 1 else np.zeros(n, np.float64)


ADVANTAGES: dict[str, AdvantageFunction] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
"""Every estimator by the name that `[algorithm] advantage` gives it."""


def advantages(name: str, rewards: npt.ArrayLike) -> FloatArray:
    """The advantages of one group's rollouts, in their order."""
    return ADVANTAGES[name](np.asarray(rewards, np.float64))
