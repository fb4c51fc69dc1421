"""The vocabulary projection and what is read from it as one operation, for models whose head is a plain matrix.

Logits exist for one chunk at a time, in float32, and again in the backward pass, which turns them into gradients by
the formula of the softmax. The gradient of the matrix is added up in float32 over all chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.training.families import Index
from headrace.training.packing import MicroBatch
from headrace.training.transfer import upload
from headrace.training.wide_head import wide_product


class Reading(NamedTuple):
    """What is read from the logits of n positions: U pairs of position and token, by ascending position."""

    rows: torch.Tensor  # [U], which of the n positions
    tokens: torch.Tensor  # [U]
    owners: torch.Tensor  # [M], the pair that each of the row's targets is
    chunks: tuple[tuple[int, int, int, int], ...]
    """Positions from and to, pairs from and to."""

    @classmethod
    def of(cls, row: MicroBatch, inverse: Index, size: int, device: torch.device) -> Reading:
        """The targets of a row, which are at these of its positions, in chunks of `size` positions."""
        # Answers that begin with the same token after one prompt are one pair. As single numbers they sort ten times
        # faster, and a device that has nothing else to do yet waits for this.
        width = int(row.targets.max()) + 1
        numbers, owners = np.unique(inverse * width + row.targets, return_inverse=True)
        unique = np.stack(np.divmod(numbers, width))
        count = int(inverse.max()) + 1
        starts = np.arange(0, count, size)
        ends = np.minimum(starts + size, count)
        places = np.searchsorted(unique[0], np.stack([starts, ends]))
        chunks = tuple(zip(*(part.tolist() for part in (starts, ends, *places)), strict=True))
        rows, tokens = upload(unique, device)
        return cls(rows, tokens, upload(owners.reshape(-1), device), chunks)


class Arithmetic(NamedTuple):
    """What is done to a chunk of logits; compiled, each is one pass over them."""

    normalisers: Callable[[torch.Tensor, float], torch.Tensor]
    slopes: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.dtype], torch.Tensor]


def _normalisers(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / temperature).logsumexp(dim=-1)


def _slopes(
    logits: torch.Tensor, normalisers: torch.Tensor, shares: torch.Tensor, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    return ((logits / temperature - normalisers[:, None]).exp() * (-shares / temperature)[:, None]).to(dtype)


PLAIN = Arithmetic(_normalisers, _slopes)


def compiled_arithmetic() -> Arithmetic:
    """The same, compiled when first used: for a full chunk, and once more for any other."""
    return Arithmetic(torch.compile(_normalisers), torch.compile(_slopes))


def read_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reading: Reading,
    temperature: float,
    arithmetic: Arithmetic = PLAIN,
) -> torch.Tensor:
    """The log-probability of every target, [M], differentiable, from hidden states [n, d] and a matrix [V, d]."""
    found: torch.Tensor = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, reading, temperature, arithmetic
    )
    return found.index_select(0, reading.owners)


class _Head(torch.autograd.Function):
    """The log-probabilities of the U pairs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        reading: Reading,
        temperature: float,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        normalisers, chosen = [], []
        for start, end, first, last in reading.chunks:
            logits = wide_product(hidden[start:end], weight)
            normalisers.append(arithmetic.normalisers(logits, temperature))
            chosen.append(logits[reading.rows[first:last] - start, reading.tokens[first:last]])
        whole = torch.cat(normalisers)
        logprobs = torch.cat(chosen) / temperature - whole[reading.rows]
        ctx.save_for_backward(hidden, weight, whole, logprobs)
        ctx.arguments = reading, temperature, arithmetic
        return logprobs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, normalisers, logprobs = ctx.saved_tensors
        reading, temperature, arithmetic = ctx.arguments
        shares = torch.zeros_like(normalisers).index_add_(0, reading.rows, gradient)
        # Where a token was chosen, its own gradient is added to that of the softmax.
        there = (gradient - logprobs.exp() * shares[reading.rows]) / temperature
        of_hidden = torch.empty_like(hidden)
        of_weight: torch.Tensor | None = None
        for start, end, first, last in reading.chunks:
            logits = wide_product(hidden[start:end], weight)
            slopes = arithmetic.slopes(logits, normalisers[start:end], shares[start:end], temperature, hidden.dtype)
            del logits
            at = reading.rows[first:last] - start, reading.tokens[first:last]
            slopes.index_put_(at, there[first:last].to(slopes.dtype))
            of_hidden[start:end] = slopes @ weight
            if ctx.needs_input_grad[1]:
                part = wide_product(slopes.t(), hidden[start:end].t())
                of_weight = part if of_weight is None else of_weight.add_(part)
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None, None
