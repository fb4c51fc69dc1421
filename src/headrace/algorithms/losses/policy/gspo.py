"""GSPO: one importance ratio for a whole sequence, the geometric mean of its tokens' ratios, clipped as one.

The tokens of a sequence are clipped together or not at all, and each token has the sequence's ratio as its weight.
"""

from functools import partial

from headrace.algorithms.losses.base import (
    Loss,
    TokenInputs,
    TokenLoss,
    clip_range,
    log_ratio,
    policy_sums,
    sequence_means,
)
from headrace.algorithms.losses.policy.grpo import clipped_surrogate
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high")
CAPS_WEIGHTS = True
CLIP_LOW, CLIP_HIGH = 3e-4, 4e-4


def gspo(inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), with s = exp(mean log r) over the token's sequence.

    The code uses sg(s) * pi / sg(pi) in place of s. It is equal to s, but its gradient reaches only the token's own log
    pi. If all tokens of a sequence have the same advantage and the same weight, the gradient of the sum is that of s
    itself.
    """
    fixed = inputs.logprobs.detach()
    log_ratios = log_ratio(fixed, inputs.behaviour)
    ratio = (sequence_means(log_ratios, inputs.sequences) + inputs.logprobs - fixed).exp()
    values, clipped = clipped_surrogate(ratio, inputs, clip_low, clip_high)
    return TokenLoss(values, policy_sums(log_ratios, clipped))


def build(config: AlgorithmConfig) -> Loss:
    """Build GSPO with the configuration's `clip_low` and `clip_high`."""
    low, high = clip_range(config, CLIP_LOW, CLIP_HIGH)
    return partial(gspo, clip_low=low, clip_high=high)
