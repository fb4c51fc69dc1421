"""Clipped GRPO: the pessimistic minimum of the plain and the clipped surrogate.

A token gets no gradient if its ratio has left the trust region in the direction of its advantage.
"""

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, capped, clip_range, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high")
CAPS_WEIGHTS = True
CLIP_LOW, CLIP_HIGH = 0.2, 0.2


def clipped_grpo(inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = pi / mu."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behaviour)
    values, clipped = clipped_surrogate(log_ratios.exp(), inputs, clip_low, clip_high)
    return TokenLoss(values, policy_sums(log_ratios, clipped))


def clipped_surrogate(
    ratio: torch.Tensor, inputs: TokenInputs, clip_low: float, clip_high: float, weight: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -w min(r A, clip(r) A) of each token for any ratio r, and whether the clipped term is the smaller one.

    The product w r of a token that is not clipped is at most the cap that a correction, such as `tis`, sets for the
    token.
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = (bounded * inputs.advantages < ratio * inputs.advantages).detach()
    weights = torch.where(clipped, weight * bounded, capped(weight * ratio, inputs))
    return -weights * inputs.advantages, clipped


def build(config: AlgorithmConfig) -> Loss:
    """Build clipped GRPO with the configuration's `clip_low` and `clip_high`."""
    low, high = clip_range(config, CLIP_LOW, CLIP_HIGH)
    return partial(clipped_grpo, clip_low=low, clip_high=high)
