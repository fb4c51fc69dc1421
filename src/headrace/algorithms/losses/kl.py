"""The divergence of the policy from a reference, estimated from the sampled tokens and added to any loss.

Importing this module registers the term: `build_loss` then adds it to every loss, if `[algorithm] kl` asks for it.

On-policy, the expected gradient of k1 and k2 is that of KL(pi || reference), and the expected gradient of k3 is that of
KL(reference || pi).
"""

from __future__ import annotations

from typing import Literal

import torch

from headrace.algorithms.losses.base import ADDITIONS, Loss, TokenInputs, TokenLoss, given, log_ratio
from headrace.config.schema import AlgorithmConfig


def divergence(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Return the estimate for each token, with d = log(pi / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    The plain derivative of k1 is the derivative of log pi. Its mean over sampled tokens is zero, so it would not pull
    the policy towards the reference. For this reason the value of k1 is d, but its gradient is d times the gradient of
    log pi, which is also the gradient of k2.
    """
    gap = logprobs - reference
    if estimator == "k1":
        still = gap.detach()
        return still + still * (gap - still)
    if estimator == "k2":
        return gap.square() / 2
    # The clamped gap, because exp(-gap) overflows where the reference is far more likely than the policy.
    gap = log_ratio(logprobs, reference)
    return torch.expm1(-gap) + gap


def held_to_reference(loss: Loss, estimator: Literal["k1", "k2", "k3"], weight: float) -> Loss:
    """Return the loss plus weight x divergence at every trained token, also at tokens that corrections leave out."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result = loss(inputs)
        kl = divergence(inputs.logprobs, given(inputs.reference), estimator)
        return TokenLoss(result.values + weight * kl, result.sums | {"reference_kl": kl.detach().sum()})

    return whole


def extend(config: AlgorithmConfig, loss: Loss) -> Loss:
    """Return the loss with the configured divergence, if there is one."""
    return loss if config.kl == "none" else held_to_reference(loss, config.kl, config.kl_weight)


ADDITIONS.append(extend)
