"""CISPO: REINFORCE with an importance weight that is clipped from above and held constant.

Every token keeps a gradient: clipping bounds the token's weight but never removes the token.
"""

from functools import partial

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, capped, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("clip_high",)
CAPS_WEIGHTS = True
CLIP_HIGH = 0.28


def cispo(inputs: TokenInputs, *, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -sg(min(r, 1 + clip_high)) * A * log pi, with r = pi / mu."""
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    ratio = log_ratios.exp()
    values = -capped(ratio.clamp(max=1.0 + clip_high), inputs) * inputs.advantages * inputs.logprobs
    return TokenLoss(values, policy_sums(log_ratios, ratio > 1.0 + clip_high))


def build(config: AlgorithmConfig) -> Loss:
    """Build CISPO with the configuration's `clip_high`."""
    return partial(cispo, clip_high=CLIP_HIGH if config.clip_high is None else config.clip_high)
