"""REINFORCE without importance weights: every token is taken as if the policy in training had sampled it.

It is right on-policy only. It is what the other losses are compared with: what age costs when nothing is done about it.
"""

from __future__ import annotations

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

USES_RATIOS = False


def reinforce(inputs: TokenInputs) -> TokenLoss:
    """-A log pi."""
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    return TokenLoss(-inputs.advantages * inputs.logprobs, policy_sums(log_ratios, torch.zeros_like(log_ratios)))


def build(config: AlgorithmConfig) -> Loss:
    """REINFORCE, which has nothing to set."""
    return reinforce
