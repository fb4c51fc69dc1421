"""GSPO: one importance ratio for a whole sequence, the geometric mean of its tokens' ratios, clipped as one.

The tokens of a sequence are clipped together or not at all, and each gets the sequence's ratio as its weight.
"""

from __future__ import annotations

from functools import partial

from headrace.algorithms.losses.base import (
    Loss,
    TokenInputs,
    TokenLoss,
    log_ratio,
    policy_sums,
    sequence_means,
)
from headrace.algorithms.losses.policy.grpo import clipped_surrogate
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high")
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4


def gspo(inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean log r) over the token's sequence.

    In place of s stands sg(s) * pi / sg(pi): equal to s, with a gradient that reaches the token's own log pi alone.
    Where a sequence's tokens have one advantage and one weight, the gradient of the sum is that of s itself.
    """
    fixed = inputs.logprobs.detach()
    log_ratios = log_ratio(fixed, inputs.behaviour)
    ratio = (sequence_means(log_ratios, inputs.sequences) + inputs.logprobs - fixed).exp()
    values, clipped = clipped_surrogate(ratio, inputs.advantages, clip_low, clip_high)
    return TokenLoss(values, policy_sums(log_ratios, clipped))


def build(config: AlgorithmConfig) -> Loss:
    """GSPO with the configuration's `clip_low` and `clip_high`."""
    return partial(
        gspo,
        clip_low=CLIP_LOW if config.clip_low is None else config.clip_low,
        clip_high=CLIP_HIGH if config.clip_high is None else config.clip_high,
    )
