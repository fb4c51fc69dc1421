"""TOPR: good answers are imitated with weight 1. Bad answers get a smaller weight, the less likely they have become.

The weight of a bad answer is the importance ratio of the whole answer, at most 1. Answers that the policy no longer
gives are left alone, so unlikely answers are not pushed down without end.
"""

import torch

from headrace.algorithms.losses.base import (
    MAX_LOG_RATIO,
    Loss,
    TokenInputs,
    TokenLoss,
    capped,
    log_ratio,
    policy_sums,
    sequence_sums,
)
from headrace.config.schema import AlgorithmConfig

CAPS_WEIGHTS = True


def topr(inputs: TokenInputs) -> TokenLoss:
    """Return -w A log pi. w = 1 if A >= 0, else the sequence's min(prod r, 1) without a gradient, with r = pi / mu."""
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    whole = sequence_sums(log_ratios, inputs.sequences)
    negative = inputs.advantages < 0
    weight = capped(torch.where(negative, whole.clamp(-MAX_LOG_RATIO, 0.0).exp(), 1.0), inputs)
    return TokenLoss(-weight * inputs.advantages * inputs.logprobs, policy_sums(log_ratios, negative & (whole > 0)))


def build(config: AlgorithmConfig) -> Loss:
    """Build TOPR, which has no settings."""
    return topr
