"""The entropy of the policy at trained tokens, as a bonus on any loss or only as a metric.

The entropy is that of the sampling distribution: at the sampling temperature, over the tokens that sampling kept.
"""

from __future__ import annotations

from headrace.algorithms.losses.base import ADDITIONS, Loss, TokenInputs, TokenLoss, given
from headrace.config.schema import AlgorithmConfig


def with_entropy(loss: Loss, weight: float) -> Loss:
    """Return the loss minus weight x entropy at every trained token. With weight 0 the entropy is only measured."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result, entropy = loss(inputs), given(inputs.entropy)
        values = result.values - weight * entropy if weight else result.values
        return TokenLoss(values, result.sums | {"entropy": entropy.detach().sum()})

    return whole


def extend(config: AlgorithmConfig, loss: Loss) -> Loss:
    """Return the loss with the configured entropy bonus, if there is one."""
    return loss if config.entropy_weight is None else with_entropy(loss, config.entropy_weight)


ADDITIONS.append(extend)
