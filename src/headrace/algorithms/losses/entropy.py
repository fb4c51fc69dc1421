"""The entropy of the policy at trained tokens: a bonus on any loss, or only a metric.

It is the entropy of what is sampled from: at the sampling temperature, among the tokens that sampling kept.
"""

from __future__ import annotations

from headrace.algorithms.losses.base import ADDITIONS, Loss, TokenInputs, TokenLoss, given
from headrace.config.schema import AlgorithmConfig


def with_entropy(loss: Loss, weight: float) -> Loss:
    """The loss less weight x entropy at every trained token; weight 0 only measures it."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result, entropy = loss(inputs), given(inputs.entropy)
        values = result.values - weight * entropy if weight else result.values
        return TokenLoss(values, result.sums | {"entropy": entropy.detach().sum()})

    return whole


def extend(config: AlgorithmConfig, loss: Loss) -> Loss:
    """The loss with the configured bonus, if there is one."""
    return loss if config.entropy_weight is None else with_entropy(loss, config.entropy_weight)


ADDITIONS.append(extend)
