"""DPPO with total variation: the trust region is in probabilities, not in ratios.

A rare token may change by a large ratio, but a common token may not. A token gets no gradient if its probability has
moved by more than `delta` in the direction of its advantage.
"""

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, capped, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("dppo_delta",)
CAPS_WEIGHTS = True


def dppo_tv(inputs: TokenInputs, *, delta: float) -> TokenLoss:
    """Return -r A, with r = pi / mu; 0 if A > 0 and pi - mu > delta, or if A < 0 and mu - pi > delta."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behaviour)
    moved = inputs.logprobs.detach().exp() - inputs.behaviour.exp()
    masked = torch.sign(inputs.advantages) * moved > delta
    values = torch.where(masked, 0.0, -capped(log_ratios.exp(), inputs) * inputs.advantages)
    return TokenLoss(values, policy_sums(log_ratios, masked))


def build(config: AlgorithmConfig) -> Loss:
    """Build DPPO-TV with the configuration's `dppo_delta`."""
    return partial(dppo_tv, delta=config.dppo_delta)
