"""The divergence between policy and teacher over k + 1 outcomes: the teacher's k likeliest tokens, and all others.

All other tokens together, the tail, count as one token. So the compared numbers are two whole distributions, and their
divergence is never negative. The divergence is zero if the distributions are equal, and never larger than the
divergence over the whole vocabulary.
"""

from typing import Literal, NamedTuple

import torch

LONGEST_GAP = 20.0
"""The reverse divergence counts a gap between two log-probabilities at most up to this value, because the teacher may
give a tail no probability at all."""


class TopTokens(NamedTuple):
    """The log-probabilities of the teacher's k likeliest tokens, and of their tail, at N trained tokens."""

    policy: torch.Tensor
    """[N, k], differentiable: under the policy in training."""
    policy_tail: torch.Tensor
    """[N], differentiable."""
    teacher: torch.Tensor
    """[N, k], under the teacher."""
    teacher_tail: torch.Tensor
    """[N]."""


def top_divergence(top: TopTokens, direction: Literal["forward", "reverse"]) -> torch.Tensor:
    """Return KL(teacher || policy), the forward direction, or KL(policy || teacher), the reverse one, at each token."""
    policy = torch.cat([top.policy, top.policy_tail[:, None]], dim=1)
    teacher = torch.cat([top.teacher, top.teacher_tail[:, None]], dim=1)
    # Where the first distribution gives no probability, the product is 0 in the limit, but not in floating point.
    if direction == "reverse":
        probabilities, gaps = policy.exp(), (policy - teacher).clamp(max=LONGEST_GAP)
    else:
        probabilities, gaps = teacher.exp(), teacher - policy
    return (probabilities * torch.where(probabilities > 0, gaps, 0.0)).sum(dim=1)
