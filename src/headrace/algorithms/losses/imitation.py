"""Imitation: plain likelihood of somebody else's tokens. Behaviour and advantages play no part."""

from __future__ import annotations

import torch

from headrace.algorithms.losses.base import TokenLoss


def imitation(logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """-log pi."""
    values = -logprobs
    return TokenLoss(values, {"nll": values.detach().sum()})
