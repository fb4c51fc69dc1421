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
IntArray = npt.NDArray[np.int64]
AdvantageFunction = Callable[[Sequence[FloatArray]], list[FloatArray]]
"""A function from the rewards of each group of a step to the advantages of each group: the form of one of your own."""
Estimator = Callable[[FloatArray, IntArray], FloatArray]
"""A function from the rewards of all groups, one group after the other, and the sizes of the groups, to the advantages
in the same order. Built-in estimators have this form, because a group may be only one token of its answers (see
`credit` above), and a list with an array for every token would take long."""

COMPARES = ("grpo", "dr_grpo", "rloo", "maxrl")
"""The estimators that compare the answers of a group with each other, and so need at least two answers. The check of
the configuration reads this assignment from the source, without importing this file."""
EPSILON = 1e-6
"""The constant that is added to a standard deviation: small compared with any real spread of rewards, large compared
with rounding."""


def grpo(rewards: FloatArray) -> FloatArray:
    """Return (R - mean) / (std + EPSILON) with the population's standard deviation; zeros if all rewards are equal."""
    centred = dr_grpo(rewards)
    return centred / (centred.std(axis=-1, keepdims=True) + EPSILON) if centred.size else centred


def dr_grpo(rewards: FloatArray) -> FloatArray:
    """Return R - mean. There is no division by the spread, so easy and hard prompts keep their scale."""
    if not rewards.size:
        return np.zeros_like(rewards)
    # The mean of equal numbers may be off by rounding, and grpo would amplify that error.
    alike = np.all(rewards == rewards[..., :1], axis=-1, keepdims=True)
    return np.asarray(np.where(alike, 0.0, rewards - rewards.mean(axis=-1, keepdims=True)), np.float64)


def rloo(rewards: FloatArray) -> FloatArray:
    """Return R - mean of the others. A group of one has no others and gets zero."""
    n = rewards.shape[-1]
    return dr_grpo(rewards) * (n / (n - 1)) if n > 1 else np.zeros_like(rewards)


def maxrl(rewards: FloatArray) -> FloatArray:
    """Return (R - mean) / mean, so that hard prompts count more; zeros if the mean is not above 0.

    This is for rewards that are not negative: a negative mean would reverse every sign.
    """
    if not rewards.size:
        return np.zeros_like(rewards)
    mean = rewards.mean(axis=-1, keepdims=True)
    found = np.zeros_like(rewards)
    np.divide(dr_grpo(rewards), mean, out=found, where=mean > 0)
    return found


def each(estimate: Callable[[FloatArray], FloatArray]) -> Estimator:
    """Return the estimator that applies `estimate` to each group by itself.

    `estimate` gets all groups of the same size at once, as the rows of an array.
    """

    def apply(rewards: FloatArray, sizes: IntArray) -> FloatArray:
        found = np.zeros(len(rewards), np.float64)
        starts = np.cumsum(sizes) - sizes
        for size in set(sizes.tolist()):
            rows = starts[sizes == size][:, np.newaxis] + np.arange(size)
            found[rows] = estimate(rewards[rows])
        return found

    return apply


def reinforce_plus_plus(rewards: FloatArray, sizes: IntArray) -> FloatArray:
    """Return (R - mean) / (std + EPSILON) over all rollouts of the step, so prompts are compared with each other."""
    return grpo(rewards)


ADVANTAGES: dict[str, Estimator] = {
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
    sizes = np.array([len(each) for each in rewards], np.int64)
    return _cut(advantages_of_sets(name, _joined(rewards), sizes), sizes)


def advantages_of_sets(name: str, rewards: FloatArray, sizes: IntArray) -> FloatArray:
    """Return the advantages of rewards that are compared within sets, which follow each other and have these sizes."""
    if name in ADVANTAGES:
        return ADVANTAGES[name](rewards, sizes)
    return _joined(_advantages_of_user(name, _cut(rewards, sizes)))


def _cut(values: FloatArray, sizes: IntArray) -> list[FloatArray]:
    """Return consecutive parts of these sizes."""
    ends = np.cumsum(sizes)
    return [values[start:end] for start, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate([np.zeros(0, np.float64), *parts])


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
