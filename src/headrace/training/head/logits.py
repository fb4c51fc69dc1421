"""Float32 logits of a 16-bit head, for one chunk of positions at a time.

There are two ways. Inside `WideHead.in_force` the model's own head code computes the logits: the head's matrices
multiply into float32, so a bias, scale or cap that follows is computed in float32 too. `read_head` is for heads that
are a plain matrix. It computes the projection and reads the log-probabilities as one operation, whose backward pass
computes the logits again and turns them into gradients by the formula of the softmax.

In both, the gradient of a matrix is added up in float32 over all chunks of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from headrace.models.head import HALF, wide_product
from headrace.training.devices import upload
from headrace.training.rows.base import Index, MicroBatch


class WideHead:
    """The head of one model while one row is read: forward, and again in the backward pass."""

    def __init__(self, model: Any) -> None:
        self._forwards = [(layer, _wide(layer)) for layer in _half_matrices(model)]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Make the head's matrices multiply into float32 inside this context.

        Matrices of 32 bits and more are unchanged.
        """
        with ExitStack() as undo:
            for layer, forward in self._forwards:
                layer.__dict__["forward"] = forward
                undo.callback(layer.__dict__.pop, "forward")
            yield


def _half_matrices(model: Any) -> list[torch.nn.Linear]:
    """Return the 16-bit matrices with an output for each token: the head's, and what an adapter adds to the head."""
    head = model.get_output_embeddings()
    tokens = head.weight.shape[0]
    return [
        layer
        for layer in head.modules()
        if type(layer) is torch.nn.Linear and layer.weight.shape[0] == tokens and layer.weight.dtype in HALF
    ]


def _wide(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward function that gives the layer's output in float32.

    The function is called once for each chunk of a row. All calls share one stand-in for the weight, in which the
    weight's gradients of all chunks add up in float32 before they are cast to the weight's dtype once.
    """
    weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
    gradient: torch.Tensor = _Gradient.apply(weight)  # type: ignore[no-untyped-call]

    def multiplied(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        found: torch.Tensor = _Product.apply(rows, weight.detach(), gradient)  # type: ignore[no-untyped-call]
        return found.reshape(*hidden.shape[:-1], -1)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(hidden, DTensor):
            # The vocabulary is divided over the tensor ranks. Each rank computes the logits of its own part of the
            # vocabulary, so its gradient of the hidden states is only one summand of the whole gradient.
            own = multiplied(hidden.to_local(grad_placements=[Partial()]))
            whole = torch.empty((*own.shape[:-1], layer.weight.shape[0]), device="meta")
            logits: torch.Tensor = DTensor.from_local(
                own, hidden.device_mesh, [Shard(-1)], shape=whole.shape, stride=whole.stride()
            )
        else:
            logits = multiplied(hidden)
        return logits if layer.bias is None else logits + layer.bias

    return forward


class _Gradient(torch.autograd.Function):
    """Makes the stand-in for a matrix: a float32 tensor of the same shape that takes no memory.

    Autograd adds up the stand-in's gradients in float32. Then `backward` casts their sum to the dtype of the matrix.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(ctx.dtype)


class _Product(torch.autograd.Function):
    """The product `hidden @ weight.t()` in float32.

    The gradient of the weight goes to the stand-in of `_Gradient`, whose values are not used.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return wide_product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        slopes = gradient.to(hidden.dtype)
        of_hidden = slopes @ weight if ctx.needs_input_grad[0] else None
        of_weight = wide_product(slopes.t(), hidden.t()) if ctx.needs_input_grad[2] else None
        return of_hidden, None, of_weight


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


@cache
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
