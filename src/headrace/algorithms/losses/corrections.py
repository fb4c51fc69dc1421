"""Corrections: rules for tokens on which policy and sampler disagree, for any loss.

A correction looks only at the recorded ratio rho = sg(pi) / mu, at advantages and at sequences. Every loss already
takes its importance ratio against the recorded mu, so a correction limits a token's weight or removes the token, and
never multiplies by rho again. Clips and masks of the loss stay those of the recorded mu.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch

from headrace.algorithms.losses.base import (
    CORRECTIONS,
    Corrected,
    TokenInputs,
    log_ratio,
    sequence_means,
    sequence_sums,
    unlimited,
)

READS = {
    "tis": ("tis_cap",),
    "icepop": ("icepop_low", "icepop_high"),
    "mis": ("mis_ratio", "mis_low", "mis_high"),
    "opsm": ("opsm_limit",),
}
"""The keys of [algorithm] that only this correction reads."""
GOES_BY_REWARDS = ("opsm",)
CAPS_WEIGHTS = ("tis",)


def tis(inputs: TokenInputs, *, cap: float) -> Corrected:
    """Truncated importance sampling: no token has a larger importance weight than `cap`."""
    caps = torch.full_like(inputs.behaviour, cap)
    return Corrected(caps, torch.ones_like(caps, dtype=torch.bool))


def icepop(inputs: TokenInputs, *, low: float, high: float) -> Corrected:
    """IcePop: a token counts only if low <= rho <= high."""
    ratio = log_ratio(inputs.logprobs, inputs.behaviour).exp()
    return Corrected(unlimited(inputs.behaviour), (ratio >= low) & (ratio <= high))


def mis(inputs: TokenInputs, *, low: float, high: float, ratio: Literal["product", "mean"]) -> Corrected:
    """Sequence masking: a sequence counts only if low <= its ratio <= high.

    The ratio of a sequence is the product of its tokens' rho, or their geometric mean, which does not grow with the
    length.
    """
    over = {"product": sequence_sums, "mean": sequence_means}[ratio]
    whole = over(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)
    kept = whole <= math.log(high)
    return Corrected(unlimited(inputs.behaviour), kept & (whole >= math.log(low)) if low > 0 else kept)


def opsm(inputs: TokenInputs, *, limit: float) -> Corrected:
    """Off-policy sequence masking: drop tokens with A < 0 if the sequence mean of log mu - log pi exceeds `limit`."""
    drift = -sequence_means(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)
    return Corrected(unlimited(inputs.behaviour), ~((inputs.advantages < 0) & (drift > limit)))


CORRECTIONS["tis"] = lambda config: partial(tis, cap=config.tis_cap)
CORRECTIONS["icepop"] = lambda config: partial(icepop, low=config.icepop_low, high=config.icepop_high)
CORRECTIONS["mis"] = lambda config: partial(mis, low=config.mis_low, high=config.mis_high, ratio=config.mis_ratio)
CORRECTIONS["opsm"] = lambda config: partial(opsm, limit=config.opsm_limit)
