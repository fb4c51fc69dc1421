"""SAPO: a soft gate in place of a clip.

The gradient of a token fades as its ratio moves away from 1, in either direction, and never stops abruptly. With the
default temperatures it fades faster for tokens with a negative advantage.
"""

from functools import partial

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, capped, log_ratio, policy_sums
from headrace.config.schema import AlgorithmConfig

READS = ("sapo_tau_positive", "sapo_tau_negative")
CAPS_WEIGHTS = True


def sapo(inputs: TokenInputs, *, tau_positive: float, tau_negative: float) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, with r = pi / mu, where tau depends on the sign of A."""
    log_ratios = log_ratio(inputs.logprobs, inputs.behaviour)
    tau = torch.full_like(inputs.behaviour, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    ratio = log_ratios.exp()
    soft = torch.sigmoid(tau * (ratio - 1.0))
    # The derivative of the gate by log pi, which is the token's weight in the gradient.
    weight = (4.0 * soft * (1.0 - soft) * ratio).detach().clamp(min=torch.finfo(ratio.dtype).tiny)
    gate = 4.0 / tau * soft * (capped(weight, inputs._replace(weight_floor=None)) / weight)
    return TokenLoss(-gate * inputs.advantages, policy_sums(log_ratios, torch.zeros_like(gate, dtype=torch.bool)))


def build(config: AlgorithmConfig) -> Loss:
    """Build SAPO with the configuration's two temperatures."""
    return partial(sapo, tau_positive=config.sapo_tau_positive, tau_negative=config.sapo_tau_negative)
