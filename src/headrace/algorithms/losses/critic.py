"""Generalised advantage estimation (GAE): what a critic makes of the rewards of tokens.

The value of a token is what the critic expects of the rest of its sequence before the token is sampled. After its last
token a sequence is worth nothing.
"""

from typing import NamedTuple

import torch

from headrace.algorithms.losses.base import sums_to_go


class Estimates(NamedTuple):
    """What follows from rewards and values for N tokens. Nothing of it has a gradient."""

    advantages: torch.Tensor
    targets: torch.Tensor
    """What the values should have been: value + advantage."""


def gae(
    rewards: torch.Tensor, values: torch.Tensor, sequences: torch.Tensor, *, discount: float, decay: float
) -> Estimates:
    """Return A(t) = d(t) + discount x decay x A(t + 1), with d(t) = r(t) + discount x V(t + 1) - V(t)."""
    values = values.detach()
    goes_on = torch.zeros_like(values)
    goes_on[:-1] = (sequences[1:] == sequences[:-1]).to(values.dtype)
    surprise = rewards + discount * goes_on * values.roll(-1) - values
    advantages = sums_to_go(surprise, sequences, discount * decay)
    return Estimates(advantages, values + advantages)
