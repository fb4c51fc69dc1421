"""The estimators that compute advantages from the rewards of a step's groups. Each estimator is a pure function.

All built-in estimators keep two rules. If the rollouts of a group are reordered, their advantages are reordered in the
same way. The advantages of each group sum to zero (for `reinforce_plus_plus`: those of the whole step), so rollouts
that all have the same reward teach nothing. This module imports no torch.

A function of your own is selected in the configuration by `advantage = "my_advantage.py:centred"`. It gets one array of
rewards for each group of the step, and returns one array of advantages for each group, with one number for each reward.
(`credit` uses the same functions for parts of rollouts: it gives them one array for each set of parts to compare.)
If the function compares the answers of a group with each other, its file should declare `COMPARES = ("centred",)`. A
run with `group_size = 1` is then refused before it starts.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.errors import UserError
from headrace.reference import describe, import_function

FloatArray = npt.NDArray[np.float64]
AdvantageFunction = Callable[[Sequence[FloatArray]], list[FloatArray]]
"""A function from the rewards of each group of a step to the advantages of each group."""

COMPARES = ("grpo", "dr_grpo", "rloo", "maxrl")
"""The estimators that compare the answers of a group with each other, and so need at least two answers. The check of
the configuration reads this assignment from the source, without importing this file."""
EPSILON = 1e-6
"""The constant that is added to a standard deviation: small compared with any real spread of rewards, large compared
with rounding."""


def grpo(rewards: FloatArray) -> FloatArray:
    """Return (R - mean) / (std + EPSILON) with the population's standard deviation; zeros if all rewards are equal."""
    centred = dr_grpo(rewards)
    return centred / (centred.std() + EPSILON) if len(centred) else centred


def dr_grpo(rewards: FloatArray) -> FloatArray:
    """Return R - mean. There is no division by the spread, so easy and hard prompts keep their scale."""
    if len(rewards) == 0 or bool(np.all(rewards == rewards[0])):
        # The mean of equal numbers may be off by rounding, and grpo would amplify that error.
        return np.zeros(len(rewards), np.float64)
    return np.asarray(rewards - rewards.mean(), np.float64)


def rloo(rewards: FloatArray) -> FloatArray:
    """Return R - mean of the others. A group of one has no others and gets zero."""
    n = len(rewards)
    return dr_grpo(rewards) * (n / (n - 1)) if n > 1 else np.zeros(n, np.float64)


def maxrl(rewards: FloatArray) -> FloatArray:
    """Return (R - mean) / mean, so that hard prompts count more; zeros if the mean is not above 0.

    This is for rewards that are not negative: a negative mean would reverse every sign.
    """
    if len(rewards) == 0 or rewards.mean() <= 0:
        return np.zeros(len(rewards), np.float64)
    return dr_grpo(rewards) / float(rewards.mean())


def reinforce_plus_plus(groups: Sequence[FloatArray]) -> list[FloatArray]:
    """Return (R - mean) / (std + EPSILON) over all rollouts of the step, so prompts are compared with each other."""
    if not groups:
        return []
    cuts = np.cumsum([len(rewards) for rewards in groups])[:-1]
    return np.split(grpo(np.concatenate(groups)), cuts)


def each(estimate: Callable[[FloatArray], FloatArray]) -> AdvantageFunction:
    """Return a function over the groups of a step that applies `estimate` to each group by itself."""
    return lambda groups: [estimate(rewards) for rewards in groups]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": each(grpo),
    "dr_grpo": each(dr_grpo),
    "rloo": each(rloo),
    "maxrl": each(maxrl),
    "reinforce_plus_plus": reinforce_plus_plus,
}
"""Every estimator by its name in `[algorithm] advantage`."""


def advantages(name: str, groups: Sequence[npt.ArrayLike]) -> list[FloatArray]:
    """Return the advantages of a step's rollouts: for each group, in the order of its rewards."""
    rewards = [np.asarray(each, np.float64) for each in groups]
    return ADVANTAGES[name](rewards) if name in ADVANTAGES else _advantages_of_user(name, rewards)


def _advantages_of_user(reference: str, rewards: Sequence[FloatArray]) -> list[FloatArray]:
    """Return the result of the user's own function. Raises unless it gives one finite number for each reward."""
    estimate = import_function(reference)
    try:
        found = [np.asarray(values, np.float64) for values in estimate(rewards)]
    except (Exception, SystemExit) as error:
        raise UserError(f"[algorithm] advantage: {reference} raised {describe(error)}") from error
    if [values.shape for values in found] != [each.shape for each in rewards]:
        raise UserError(f"[algorithm] advantage: {reference} did not return one number for each reward of each group")
    if not all(np.isfinite(values).all() for values in found):
        raise UserError(f"[algorithm] advantage: {reference} returned a number that is not finite")
    return found
