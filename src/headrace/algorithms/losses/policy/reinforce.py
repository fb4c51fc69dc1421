"""REINFORCE without importance weights: every token is treated as if the policy in training had sampled it.

The loss is correct on-policy only. It is the baseline for the other losses: it shows what lag costs without a remedy.
"""

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig


def reinforce(inputs: TokenInputs) -> TokenLoss:
    """Return -A log pi."""
    log_ratios = log_ratio(inputs.logprobs.detach(), inputs.behaviour)
    return TokenLoss(-inputs.advantages * inputs.logprobs, policy_sums(log_ratios, torch.zeros_like(log_ratios)))


def build(config: AlgorithmConfig) -> Loss:
    """Build REINFORCE, which has no settings."""
    return reinforce
