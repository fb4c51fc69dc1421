"""The vocabulary projection and the reading of log-probabilities, as one operation, for heads that are a plain matrix.

Logits exist for one chunk at a time, in float32. The backward pass computes them again and turns them into gradients by
the formula of the softmax. The gradient of the matrix is added up in float32 over all chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from headrace.models.head import wide_product
from headrace.training.devices import upload
from headrace.training.rows.base import Index, MicroBatch


class Reading(NamedTuple):
    """The plan for reading the logits of n positions: U pairs of position and token, sorted by position."""

    rows: torch.Tensor  # [U], the index of the pair's position among the n positions
    tokens: torch.Tensor  # [U]
    owners: torch.Tensor  # [M], for each target of the row, the index of its pair
    chunks: tuple[tuple[int, int, int, int], ...]
    """The chunks, each as (first position, end position, first pair, end pair)."""

    @classmethod
    def of(cls, row: MicroBatch, inverse: Index, size: int, device: torch.device) -> Reading:
        """Plan the reading of a row's targets in chunks of `size` positions. `inverse` has each target's position."""
        # Answers to one prompt that begin with the same token are one pair. Position and token are packed into one
        # number, because single numbers sort ten times faster, and an idle device has to wait for this.
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
    """The two functions that are applied to a chunk of logits. When compiled, each is one pass over the logits."""

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
    """Return the functions of `PLAIN`, compiled at first use: once for a full chunk, once more for any other size."""
    return Arithmetic(torch.compile(_normalisers), torch.compile(_slopes))


def read_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    reading: Reading,
    temperature: float,
    arithmetic: Arithmetic = PLAIN,
) -> torch.Tensor:
    """Return the log-probability of every target, [M], differentiable.

    `hidden` are the hidden states, [n, d], and `weight` is the matrix of the head, [V, d].
    """
    found: torch.Tensor = _Head.apply(  # type: ignore[no-untyped-call]
        hidden, weight, reading, temperature, arithmetic
    )
    return found.index_select(0, reading.owners)


class _Head(torch.autograd.Function):
    """The operation that computes the log-probabilities of the U pairs."""

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
        # At the entry of a chosen token, the token's own gradient is added to the gradient of the softmax.
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
