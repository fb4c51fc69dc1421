"""TOPR: good answers are imitated as they are, bad ones are pushed away only as far as they are still likely.

The weight of a bad answer is its whole importance ratio, at most 1: what the policy no longer says is left alone, so
unlikely answers cannot be driven down without end.
"""

from __future__ import annotations

import torch

from headrace.algorithms.losses.base import (
    MAX_LOG_RATIO,
    Loss,
    TokenInputs,
    TokenLoss,
    log_ratio,
    policy_sums,
    sequence_sums,
)
from headrace.config.schema import AlgorithmConfig


def topr(inputs: TokenInputs) -> TokenLoss:
    """-w A log pi, with w = 1 where A >= 0, else sg(min(prod r, 1)) over the token's sequence, r = pi / mu."""
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    whole = sequence_sums(log_ratios, inputs.sequences)
    negative = inputs.advantages < 0
    weight = torch.where(negative, whole.clamp(-MAX_LOG_RATIO, 0.0).exp(), 1.0)
    return TokenLoss(-weight * inputs.advantages * inputs.logprobs, policy_sums(log_ratios, negative & (whole > 0)))


def build(config: AlgorithmConfig) -> Loss:
    """TOPR, which has nothing to set."""
    return topr
