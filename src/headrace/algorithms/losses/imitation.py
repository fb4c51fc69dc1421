"""Imitation: plain likelihood of somebody else's tokens. Behaviour and advantages play no part."""

from __future__ import annotations

from headrace.algorithms.losses.base import TokenInputs, TokenLoss


def imitation(inputs: TokenInputs) -> TokenLoss:
    """-log pi."""
    values = -inputs.logprobs
    return TokenLoss(values, {"nll": values.detach().sum()})
