"""Clipped GRPO: the pessimistic minimum of the plain and the clipped surrogate.

A token whose ratio has left the trust region in the direction of its advantage gets no gradient.
"""

from __future__ import annotations

import torch

from headrace.algorithms.losses.base import Loss, TokenLoss, log_ratio, policy_sums, register
from headrace.config.schema import AlgorithmConfig


def clipped_grpo(
    logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = pi / mu."""
    log_ratios = log_ratio(logprobs, behaviour)
    ratio = log_ratios.exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return TokenLoss(-torch.minimum(plain, bounded), policy_sums(log_ratios, (bounded < plain).detach()))


@register("grpo")
def build(config: AlgorithmConfig) -> Loss:
    """Clipped GRPO with the configuration's `clip_low` and `clip_high`."""

    def loss(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        return clipped_grpo(logprobs, behaviour, advantages, clip_low=config.clip_low, clip_high=config.clip_high)

    return loss
