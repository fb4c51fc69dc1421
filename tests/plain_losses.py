"""Every loss and correction by its definition: one token at a time, no Headrace code, no stop-gradient.

What a definition holds constant is a second argument, `held`: so the reference can be differentiated numerically too.
A loss has one branch in `one`: the tests that run over every loss compare values, gradients and whole steps with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """Recorded facts of N tokens."""

    behaviour: torch.Tensor
    advantages: torch.Tensor
    sequences: list[int]
    lags: list[int]
    proximal: torch.Tensor | None = None
    teacher: torch.Tensor | None = None


DEFAULT_CLIPS = {
    "cispo": (0.2, 0.28),
    "grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "decoupled_ppo": (0.2, 0.2),
    "recomputed": (0.2, 0.2),
    "distillation": (0.2, 0.28),
}


def plain_losses(
    name: str,
    logp: torch.Tensor,
    held: torch.Tensor,
    tokens: Tokens,
    *,
    corrections: Sequence[str] = (),
    clips: tuple[float, float] | None = None,
    mix: float | None = None,
) -> torch.Tensor:
    """The loss of each token, with everything else at its default."""
    low, high = clips or DEFAULT_CLIPS.get(name, (0.0, 0.0))
    mu = [float(m) for m in tokens.behaviour]
    fixed = [float(h) for h in held]
    members = [[j for j, s in enumerate(tokens.sequences) if s == own] for own in tokens.sequences]
    kept = [kept_by(corrections, i, fixed, mu, tokens, members[i]) for i in range(len(mu))]
    losses = [one(name, i, logp, fixed, mu, tokens, members[i], low, high, mix) for i in range(len(mu))]
    if "tis" in corrections:
        losses = [limited(loss, i, name, logp, held, tokens, 2.0) for i, loss in enumerate(losses)]
    if "sequence_tis" in corrections:
        for i, loss in enumerate(losses):
            whole = math.prod(math.exp(fixed[j] - mu[j]) for j in members[i])
            losses[i] = weighted(loss, i, name, logp, held, tokens, min(whole, 2.0))
    return torch.stack([loss if kept[i] else 0.0 * logp[i] for i, loss in enumerate(losses)])


def limited(loss, i, name, logp, held, tokens, cap) -> torch.Tensor:
    """A token's weight is what its gradient has beside the advantage: it is at most `cap`."""
    weight = weight_of(loss, i, name, logp, held, tokens)
    return loss * cap / weight if weight > cap else loss


def weighted(loss, i, name, logp, held, tokens, wanted) -> torch.Tensor:
    """A token's weight is `wanted`, unless the loss gives it no gradient, or has no weights at all."""
    if name == "sapo":
        return limited(loss, i, name, logp, held, tokens, wanted)
    weight = weight_of(loss, i, name, logp, held, tokens)
    return loss * wanted / weight if weight > 0 and name != "reinforce" else loss


def weight_of(loss, i, name, logp, held, tokens) -> float:
    advantage = float(tokens.teacher[i] - held[i] if name == "distillation" else tokens.advantages[i])
    [slopes] = torch.autograd.grad(loss, logp, retain_graph=True)
    return abs(float(slopes[i]) / advantage) if advantage else 0.0


def kept_by(corrections, i, fixed, mu, tokens, members) -> bool:
    rho = math.exp(fixed[i] - mu[i])
    whole = math.prod(math.exp(fixed[j] - mu[j]) for j in members)
    drift = sum(mu[j] - fixed[j] for j in members) / len(members)
    if "icepop" in corrections and not 0.5 <= rho <= 5.0:
        return False
    if "mis" in corrections and whole > 2.0:
        return False
    return not ("opsm" in corrections and tokens.advantages[i] < 0 and drift > 1e-4)


def one(name, i, logp, fixed, mu, tokens, members, low, high, mix) -> torch.Tensor:
    a = float(tokens.advantages[i])
    ratio = torch.exp(logp[i] - mu[i])
    still = math.exp(fixed[i] - mu[i])
    if name == "distillation":
        return -min(still, 1 + high) * (float(tokens.teacher[i]) - fixed[i]) * logp[i]
    if name == "recomputed":
        begun = float(tokens.proximal[i])
        return math.exp(begun - mu[i]) * pessimistic(torch.exp(logp[i] - begun), a, low, high)
    if name == "reinforce":
        return -a * logp[i]
    if name == "cispo":
        return -min(still, 1 + high) * a * logp[i]
    if name in ("grpo", "dapo"):
        return pessimistic(ratio, a, low, high)
    if name == "gspo":
        whole = math.exp(sum(fixed[j] - mu[j] for j in members) / len(members))
        return pessimistic(whole * torch.exp(logp[i]) / math.exp(fixed[i]), a, low, high)
    if name == "sapo":
        tau = 1.0 if a > 0 else 1.05
        return -a * (4 / tau) / (1 + torch.exp(-tau * (ratio - 1)))
    if name == "dppo_tv":
        moved = math.exp(fixed[i]) - math.exp(mu[i])
        return 0.0 * logp[i] if (a > 0 and moved > 0.2) or (a < 0 and -moved > 0.2) else -ratio * a
    if name == "topr":
        weight = 1.0 if a >= 0 else min(1.0, math.prod(math.exp(fixed[j] - mu[j]) for j in members))
        return -weight * a * logp[i]
    assert name == "decoupled_ppo", f"{name} has no definition here"
    share = mix if mix is not None else (1 / tokens.lags[i] if tokens.lags[i] else 0.0)
    proximal = math.exp(mu[i]) ** share * math.exp(fixed[i]) ** (1 - share)
    return proximal / math.exp(mu[i]) * pessimistic(torch.exp(logp[i]) / proximal, a, low, high)


def pessimistic(ratio: torch.Tensor, a: float, low: float, high: float) -> torch.Tensor:
    """-min(r A, clip(r) A), told by cases."""
    if a > 0:
        return -a * (ratio if float(ratio) < 1 + high else 1 + high + 0.0 * ratio)
    return -a * (ratio if float(ratio) > 1 - low else 1 - low + 0.0 * ratio)
