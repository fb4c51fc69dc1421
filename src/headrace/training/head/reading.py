"""The arithmetic of one chunk: from logits to log-probabilities and entropies of sampled tokens.

A target with a kept set is read from the distribution over that set alone; any other target is read from the whole
vocabulary. The softmax is computed in float32 at least. The host plans what to read, so nothing here waits for a
device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from headrace.training.devices import upload
from headrace.training.rows.base import Index, MicroBatch
from headrace.types import Kept

EntropyOf = Literal["none", "value", "gradient"]
"""How the entropy is wanted: not at all, as a number, or differentiable."""


class Readings(NamedTuple):
    """The values that are read for each of M targets."""

    logprobs: torch.Tensor
    """The log-probabilities, [M], differentiable."""
    entropy: torch.Tensor | None = None
    """The entropy, [M], of the distribution that the target is read from."""


class KeptSets(NamedTuple):
    """The kept sets of those k targets of a chunk that have one, K tokens in all."""

    members: torch.Tensor  # [k], the targets that have a kept set
    rows: torch.Tensor  # [K], the token's row in the chunk
    tokens: torch.Tensor  # [K]
    owners: torch.Tensor  # [K], which of the k sets the token belongs to


@dataclass(frozen=True)
class Wanted:
    """The plan for reading m targets from a chunk of logits, [n, V]."""

    targets: Index
    """The indices of these targets among the row's targets."""
    rows: torch.Tensor  # [m], the target's row in the chunk
    tokens: torch.Tensor  # [m]
    kept: KeptSets | None
    whole: bool
    """Whether any target is read from the whole vocabulary."""

    @classmethod
    def of(cls, targets: Index, rows: Index, row: MicroBatch, kept: Kept | None, device: torch.device) -> Wanted:
        """Plan the reading of these targets, found at these rows of the chunk.

        `kept` has a set for each target of the row.
        """

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
    """Return the log-probabilities, and the entropies if they are wanted."""
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
    """Return the normaliser of each row over the vocabulary, [n], and its entropy (zeros if it is not wanted)."""
    normaliser = logits.logsumexp(dim=-1)
    if entropy == "none":
        return normaliser, torch.zeros_like(normaliser)
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        probabilities = (logits - normaliser[:, None]).exp()
        return normaliser, normaliser - (probabilities * logits).sum(dim=-1)


def _among(logits: torch.Tensor, kept: KeptSets, entropy: EntropyOf) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normaliser and the entropy over the kept tokens of each member, [k]."""
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
