"""Decoupled PPO: the trust region is around a proximal policy, and the importance weight is against the sampler.

So stale tokens are not clipped only for their age. The proximal policy is interpolated or recomputed. An interpolated
one lies on the line between the log-probabilities of sampler and policy, nearer to the policy the older a token is; it
costs no forward pass. A recomputed one uses the weights with which the version in training began.
"""

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, clip_range, given, log_ratio, policy_sums
from headrace.algorithms.losses.policy.grpo import clipped_surrogate
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high", "proximal", "proximal_mix")
NEEDS_WHEN = {"proximal": {"proximal": "recomputed"}}
CAPS_WEIGHTS = True
CLIP_LOW, CLIP_HIGH = 0.2, 0.2


def decoupled_ppo(
    inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH, proximal_mix: float | None = None
) -> TokenLoss:
    """Return -sg(prox / mu) min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = pi / prox, interpolated.

    Log prox = sg(mix log mu + (1 - mix) log pi). By default the mix is 1 / lag, and 0 at lag 0.
    """
    recorded = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    if proximal_mix is None:
        mix = torch.where(inputs.lags >= 1, 1.0 / inputs.lags.clamp(min=1.0), 0.0)
    else:
        mix = torch.full_like(recorded, proximal_mix)
    # Both factors are computed from the clamped log-ratio, so that their product never overflows.
    weight = ((1.0 - mix) * recorded).exp()
    ratio = (mix * recorded + inputs.logprobs - inputs.logprobs.detach()).exp()
    values, clipped = clipped_surrogate(ratio, inputs, clip_low, clip_high, weight)
    return TokenLoss(values, policy_sums(recorded, clipped))


def recomputed_decoupled_ppo(
    inputs: TokenInputs, *, clip_low: float = CLIP_LOW, clip_high: float = CLIP_HIGH
) -> TokenLoss:
    """Return the same loss as `decoupled_ppo`, with the proximal policy from `inputs`."""
    proximal = given(inputs.proximal)
    weight = log_ratio(proximal, inputs.behaviour).exp()
    ratio = log_ratio(inputs.logprobs, proximal).exp()
    values, clipped = clipped_surrogate(ratio, inputs, clip_low, clip_high, weight)
    return TokenLoss(values, policy_sums(log_ratio(inputs.logprobs, inputs.behaviour), clipped))


def build(config: AlgorithmConfig) -> Loss:
    """Build decoupled PPO with the configuration's clipping and proximal policy."""
    low, high = clip_range(config, CLIP_LOW, CLIP_HIGH)
    if config.proximal == "recomputed":
        return partial(recomputed_decoupled_ppo, clip_low=low, clip_high=high)
    return partial(decoupled_ppo, clip_low=low, clip_high=high, proximal_mix=config.proximal_mix)
