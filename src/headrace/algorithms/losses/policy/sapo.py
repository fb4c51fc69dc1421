"""SAPO: a soft gate in place of a clip.

A token's gradient fades as its ratio leaves 1, in either direction, and never ends abruptly; it fades faster where
probability is taken away.
"""

from __future__ import annotations

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("sapo_tau_positive", "sapo_tau_negative")


def sapo(inputs: TokenInputs, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with r = pi / mu, and tau by the sign of A."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behaviour)
    tau = torch.full_like(inputs.behaviour, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    gate = 4.0 / tau * torch.sigmoid(tau * (log_ratios.exp() - 1.0))
    return TokenLoss(-gate * inputs.advantages, policy_sums(log_ratios, torch.zeros_like(gate, dtype=torch.bool)))


def build(config: AlgorithmConfig) -> Loss:
    """SAPO with the configuration's two temperatures."""
    return partial(sapo, tau_positive=config.sapo_tau_positive, tau_negative=config.sapo_tau_negative)
