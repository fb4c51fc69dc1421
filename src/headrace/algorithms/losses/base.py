"""What a loss is: a pure function of flat arrays over trained tokens, blind to sequences, batches and weights.

A loss never normalises: the step multiplies it by the batch's weights and adds up. Its metrics are sums over tokens,
so those of micro-batches add up too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from headrace.config.schema import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: beyond it only overflow is to be had."""


class TokenLoss(NamedTuple):
    """The losses of N trained tokens."""

    values: torch.Tensor
    """[N], differentiable with respect to the policy's log-probabilities."""
    sums: dict[str, torch.Tensor]
    """Metrics as detached sums over the N tokens: divide by the tokens of the step for means."""


class Loss(Protocol):
    """A loss function."""

    def __call__(self, logprobs: torch.Tensor, behaviour: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        """The loss of each token from log pi (differentiable), the recorded log mu, and the advantage, all [N]."""
        ...


LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {}
"""Every policy loss by the name that `[algorithm] loss` gives it."""


def register(name: str) -> Callable[[Callable[[AlgorithmConfig], Loss]], Callable[[AlgorithmConfig], Loss]]:
    """Declare that this function builds the loss of this name from the configuration."""

    def declare(build: Callable[[AlgorithmConfig], Loss]) -> Callable[[AlgorithmConfig], Loss]:
        LOSSES[name] = build
        return build

    return declare


def build_loss(config: AlgorithmConfig) -> Loss:
    """The policy loss that the configuration names."""
    return LOSSES[config.loss](config)


def log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Log pi / mu, cut to +-`MAX_LOG_RATIO`."""
    return (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_sums(log_ratios: torch.Tensor, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics of every policy loss: the ratio, how often it is clipped, and two estimates of KL(mu || pi).

    `kl_k1` is -log r (unbiased, may be negative), `kl_k3` is r - 1 - log r (unbiased, never negative).
    """
    log_ratios = log_ratios.detach()
    ratio = log_ratios.exp()
    return {
        "ratio": ratio.sum(),
        "clip_fraction": clipped.sum().to(ratio.dtype),
        "kl_k1": -log_ratios.sum(),
        "kl_k3": (torch.expm1(log_ratios) - log_ratios).sum(),
    }
