"""Clipped GRPO: the pessimistic minimum of the plain and the clipped surrogate.

A token gets no gradient if its ratio has left the trust region in the direction of its advantage.
"""

from __future__ import annotations

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, clip_range, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high")
CLIP_LOW, CLIP_HIGH = 0.2, 0.2


def clipped_grpo(inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = pi / mu."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behaviour)
    values, clipped = clipped_surrogate(log_ratios.exp(), inputs.advantages, clip_low, clip_high)
    return TokenLoss(values, policy_sums(log_ratios, clipped))


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -min(r A, clip(r) A) of each token for any ratio r, and whether the clipped term is the smaller one."""
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(plain, bounded), (bounded < plain).detach()


def build(config: AlgorithmConfig) -> Loss:
    """Build clipped GRPO with the configuration's `clip_low` and `clip_high`."""
    low, high = clip_range(config, CLIP_LOW, CLIP_HIGH)
    return partial(clipped_grpo, clip_low=low, clip_high=high)
