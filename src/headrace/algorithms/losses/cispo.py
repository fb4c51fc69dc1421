"""CISPO: REINFORCE with the importance weight clipped from above and held constant.

Every token keeps a gradient: clipping bounds its weight and never silences it.
"""

from __future__ import annotations

import torch

from headrace.algorithms.losses.base import Loss, TokenLoss, log_ratio, policy_sums, register
from headrace.config.schema import AlgorithmConfig


def cispo(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor, *, clip_high: float) -> TokenLoss:
    """-sg(min(r, 1 + clip_high)) * A * log pi, with r = pi / mu."""
    log_ratios = log_ratio(logprobs.detach(), behaviour)
    ratio = log_ratios.exp()
    values = -ratio.clamp(max=1.0 + clip_high) * advantages * logprobs
    return TokenLoss(values, policy_sums(log_ratios, ratio > 1.0 + clip_high))


@register("cispo")
def build(config: AlgorithmConfig) -> Loss:
    """CISPO with the configuration's `clip_high`."""

    def loss(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        return cispo(logprobs, behaviour, advantages, clip_high=config.clip_high)

    return loss
