"""From logits to log-probabilities and entropies of what was sampled: the arithmetic of one chunk.

A target with a kept set is read from the distribution over that set alone, any other from the whole vocabulary. The
softmax is taken in float32 at least. What to read is planned on the host, so nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.training.families import Index
from headrace.training.packing import MicroBatch
from headrace.training.transfer import upload
from headrace.types import Kept

EntropyOf = Literal["none", "value", "gradient"]
"""Whether the entropy is wanted: not at all, as a number, or differentiable."""


class Readings(NamedTuple):
    """What is read for each of M targets."""

    logprobs: torch.Tensor
    """[M], differentiable."""
    entropy: torch.Tensor | None = None
    """[M], of the distribution that the target is read from."""


class KeptSets(NamedTuple):
    """The kept sets of k of a chunk's targets, K tokens in all."""

    members: torch.Tensor  # [k], which targets have one
    rows: torch.Tensor  # [K], where in the chunk
    tokens: torch.Tensor  # [K]
    owners: torch.Tensor  # [K], which of the k a token was kept for


@dataclass(frozen=True)
class Wanted:
    """What is to be read from a chunk of logits, [n, V]: m targets."""

    targets: Index
    """Which of the row's targets these are."""
    rows: torch.Tensor  # [m], where in the chunk
    tokens: torch.Tensor  # [m]
    kept: KeptSets | None
    whole: bool
    """Whether any target is read from the whole vocabulary."""

    @classmethod
    def of(cls, targets: Index, rows: Index, row: MicroBatch, kept: Kept | None, device: torch.device) -> Wanted:
        """These targets of a row, found at these rows of the chunk; `kept` has a set for each target of the row."""

        def moved(array: Any) -> torch.Tensor:
            return upload(np.asarray(array, np.int64), device)

        mine = None if kept is None else kept.at(targets)
        tokens = moved(row.targets[targets])
        if mine is None or not mine.counts.any():
            return cls(targets, moved(rows), tokens, None, True)
        members = np.flatnonzero(mine.counts)
        counts = mine.counts[members]
        sets = KeptSets(
            members=moved(members),
            rows=moved(np.repeat(rows[members], counts)),
            tokens=moved(mine.token_ids),
            owners=moved(np.repeat(np.arange(len(members)), counts)),
        )
        return cls(targets, moved(rows), tokens, sets, len(members) < len(targets))


def read(logits: torch.Tensor, wanted: Wanted, temperature: float, entropy: EntropyOf) -> Readings:
    """The log-probabilities, and the entropies where they are asked for."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    chosen = logits[wanted.rows, wanted.tokens]
    normaliser = spread = torch.zeros_like(chosen)
    if wanted.whole:
        whole, disorder = _whole(logits, entropy)
        normaliser, spread = whole[wanted.rows], disorder[wanted.rows]
    if wanted.kept is not None:
        whole, disorder = _among(logits, wanted.kept, entropy)
        normaliser = normaliser.index_copy(0, wanted.kept.members, whole)
        spread = spread.index_copy(0, wanted.kept.members, disorder)
    return Readings(chosen - normaliser, None if entropy == "none" else spread)


def _whole(logits: torch.Tensor, entropy: EntropyOf) -> tuple[torch.Tensor, torch.Tensor]:
    """The normaliser of each row over the vocabulary, [n], and its entropy (zeros where it is not asked for)."""
    normaliser = logits.logsumexp(dim=-1)
    if entropy == "none":
        return normaliser, torch.zeros_like(normaliser)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        probabilities = (logits - normaliser[:, None]).exp()
        return normaliser, normaliser - (probabilities * logits).sum(dim=-1)


def _among(logits: torch.Tensor, kept: KeptSets, entropy: EntropyOf) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over the kept tokens of each member, [k]."""
    values = logits[kept.rows, kept.tokens]
    none = values.new_zeros(len(kept.members))
    top = torch.full_like(none, -torch.inf).scatter_reduce(0, kept.owners, values.detach(), "amax")
    shares = (values - top[kept.owners]).exp()
    total = none.index_add(0, kept.owners, shares)
    normaliser = top + total.log()
    if entropy == "none":
        return normaliser, none
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return normaliser, normaliser - none.index_add(0, kept.owners, shares * values) / total
