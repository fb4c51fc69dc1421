"""Imitation: the plain likelihood of demonstrated tokens. Behaviour and advantages are not used."""

from __future__ import annotations

from headrace.algorithms.losses.base import TokenInputs, TokenLoss


def imitation(inputs: TokenInputs) -> TokenLoss:
    """Return -log pi."""
    values = -inputs.logprobs
    return TokenLoss(values, {"nll": values.detach().sum()})
