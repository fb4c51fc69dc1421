"""Log-probabilities of trained tokens, and of further tokens at the same positions if they are asked for.

The logits come from the model's own head code, because some models cap or scale them, and are in float32 at least. At
most `CHUNK_ELEMENTS` (times `DEVICE_CHUNKS` in `read_head`) exist at a time, so memory does not grow with tokens x
vocabulary. On a GPU, a head that is only a matrix is computed by `read_head`, unless kept sets are used or anything
beside the sampled tokens is read: one operation computes the projection and reads the log-probabilities, and its
backward pass computes the logits again and turns them into gradients by the formula of the softmax.

A target with a kept set is read from the distribution over that set alone; any other target is read from the whole
vocabulary. The softmax is computed in float32 at least. The host plans what to read, so nothing waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from headrace.models.attention import attending
from headrace.models.head import WideHead, wide_product
from headrace.training.attention import PackedAttention
from headrace.training.devices import input_device, upload
from headrace.training.layers import compiled_layers
from headrace.training.rows import Index, MicroBatch
from headrace.types import Float32Array, Int32Array, Kept

EntropyOf = Literal["none", "value", "gradient"]
"""How the entropy is wanted: not at all, as a number, or differentiable."""


class Readings(NamedTuple):
    """The values that are read for each of M targets."""

    logprobs: torch.Tensor
    """The log-probabilities, [M], differentiable."""
    entropy: torch.Tensor | None = None
    """The entropy, [M], of the distribution that the target is read from."""
    top: torch.Tensor | None = None
    """The log-probabilities of k given tokens at each target, [M, k], differentiable."""
    tail: torch.Tensor | None = None
    """The logarithm of the probability of all tokens but these k, [M], differentiable."""
    top_ids: torch.Tensor | None = None
    """The k tokens, [M, k], in ascending order; only if the likeliest tokens were asked for."""
    hidden: torch.Tensor | None = None
    """The hidden states that the targets are predicted from, [M, hidden size], differentiable."""


class Likeliest(NamedTuple):
    """Asks for the k likeliest tokens among the first `vocabulary` tokens."""

    k: int
    vocabulary: int


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
        """Plan the reading of targets at these rows of the chunk. `kept` has a set for each target of the row."""

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


def read(
    logits: torch.Tensor,
    wanted: Wanted,
    temperature: float | torch.Tensor,
    entropy: EntropyOf,
    top: torch.Tensor | Likeliest | None = None,
) -> Readings:
    """Return the log-probabilities, and the entropies if wanted. `temperature` is one number, or one per row, [n, 1].

    `top` asks for the log-probabilities of further tokens and of their tail, over the whole vocabulary: k given tokens
    per row, [n, k], or the likeliest ones.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, torch.Tensor) or temperature != 1.0:
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
    further = Readings(chosen) if top is None else _top(logits, top)
    return Readings(
        chosen - normaliser,
        None if entropy == "none" else spread,
        *(None if found is None else found[wanted.rows] for found in further[2:]),
    )


def _top(logits: torch.Tensor, top: torch.Tensor | Likeliest) -> Readings:
    """Return k tokens' log-probabilities for each row, [n, k], the tail's, [n], and the ids if `top` is `Likeliest`.

    The first field holds the normaliser, which the caller has already. The tail is summed from the logits of the other
    tokens: one minus the sum of k probabilities would lose its digits.
    """
    if isinstance(top, Likeliest):
        ids = logits[:, : top.vocabulary].topk(top.k, dim=-1).indices.sort(dim=-1).values
    else:
        ids = top
    chosen = logits.gather(1, ids)
    others = logits.scatter(1, ids, -torch.inf).logsumexp(dim=-1)
    normaliser = torch.logaddexp(others, chosen.logsumexp(dim=-1))
    found = ids if isinstance(top, Likeliest) else None
    return Readings(normaliser, None, chosen - normaliser[:, None], others - normaliser, found)


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


CHUNK_ELEMENTS = 1 << 26
"""The number of logits that exist at once (256 MiB in float32). A row with more is computed in chunks, and its backward
pass computes them again."""
DEVICE_CHUNKS = 4
"""Where a head is only a matrix, a GPU holds this many times `CHUNK_ELEMENTS` logits. Small chunks leave it idle."""


def read_row(
    model: Any,
    row: MicroBatch,
    *,
    temperature: float | Float32Array = 1.0,
    kept: Kept | None = None,
    entropy: EntropyOf = "none",
    top: Int32Array | Likeliest | None = None,
    hidden_states: bool = False,
    attention: PackedAttention | None = None,
    chunk_elements: int | None = None,
) -> Readings:
    """Return the log-probabilities of a row's targets, and the entropy and the hidden states if they are wanted.

    `temperature` is one number for all targets, or one for each. `kept` has a set for each target, which may be empty.
    `top` asks for further tokens at each target: k given ones, [M, k], or the likeliest ones. The caller must keep the
    row's `attention` until the backward pass, because compiled layers need it there too.
    """
    device = input_device(model)
    # Answers to one prompt share the position that predicts their first token, so its logits are computed once.
    places, inverse = np.unique(row.predictors, return_inverse=True)
    scale: float | torch.Tensor = 1.0
    if isinstance(temperature, np.ndarray):
        # A position that is read at several temperatures counts once for each of them.
        levels, level = np.unique(temperature, return_inverse=True)
        places, inverse, level = _split(row.predictors, level)
        scale = upload(levels[level], device)[:, None]
    else:
        scale = temperature
    further: torch.Tensor | Likeliest | None
    if isinstance(top, np.ndarray):
        # A position at which several sets of tokens are read counts once for each of them too.
        sets, number = np.unique(top, axis=0, return_inverse=True)
        numbers, inverse, number = _split(inverse, number.reshape(-1))
        places = places[numbers]
        scale = scale[upload(numbers, device)] if isinstance(scale, torch.Tensor) else scale
        further = upload(sets[number].astype(np.int64), device)
    else:
        further = top
    at = upload(places, device)
    inputs = {
        "input_ids": upload(row.token_ids, device)[None],
        "position_ids": upload(row.position_ids, device)[None],
        "use_cache": False,
    }
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    size = max(1, (chunk_elements or CHUNK_ELEMENTS) // vocabulary)

    def computed() -> Readings:
        plain = not isinstance(scale, torch.Tensor) and kept is None and entropy == "none" and further is None
        if device.type == "cuda" and plain and has_plain_head(model):
            return by_matrix(size * DEVICE_CHUNKS)
        if len(places) <= size and not hidden_states:
            with WideHead(model).in_force():
                logits = model.forward(**inputs, logits_to_keep=at).logits[0]
            return read(logits, Wanted.of(np.arange(len(inverse)), inverse, row, kept, device), scale, entropy, further)
        hidden = model.base_model(**inputs).last_hidden_state[0, at]
        chunks = list(_chunks(inverse, size, row, kept, device))
        return beside(hidden, _in_chunks(model, hidden, chunks, size, scale, entropy, further))

    def by_matrix(size: int) -> Readings:
        hidden = model.base_model(**inputs).last_hidden_state[0].index_select(0, at)
        assert isinstance(scale, float)
        reading = Reading.of(row, inverse, size, device)
        weight = model.get_output_embeddings().weight
        layers = compiled_layers(model)
        arithmetic = compiled_arithmetic() if layers is not None and layers.on and layers.fused else PLAIN
        return beside(hidden, Readings(read_head(hidden, weight, reading, scale, arithmetic)))

    def beside(hidden: torch.Tensor, readings: Readings) -> Readings:
        return readings._replace(hidden=hidden[upload(inverse, device)]) if hidden_states else readings

    with attending(attention or PackedAttention(row)):
        return _called(model, computed)


def _split(places: Index, kinds: Index) -> tuple[Index, Index, Index]:
    """Count a place once for each kind of reading that targets want there: a pair of place and kind.

    `places` and `kinds` have an entry for each target. Return the place of each pair, the number of each target's pair,
    and the kind of each pair.
    """
    count = int(kinds.max()) + 1
    numbers, inverse = np.unique(places * count + kinds, return_inverse=True)
    divided, kind = np.divmod(numbers, count)
    return divided, inverse, kind


_plain_heads: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def has_plain_head(model: Any) -> bool:
    """Return whether the logits are only the product of hidden states with one whole matrix, without later changes."""
    if model not in _plain_heads:
        head = model.get_output_embeddings()
        # The types must be exact: a wrapped layer, or a weight that is spread over ranks, has a class of its own.
        kinds = type(head), type(getattr(head, "bias", None)), type(getattr(head, "weight", None))
        plain = kinds == (torch.nn.Linear, type(None), torch.nn.Parameter)
        _plain_heads[model] = plain and _is_product(model, head.weight)
    return _plain_heads[model]


@torch.no_grad()
def _is_product(model: Any, weight: torch.Tensor) -> bool:
    probe = torch.linspace(-1, 1, 2 * weight.shape[1], device=weight.device).reshape(2, -1).to(weight.dtype)
    return torch.equal(_head(model, probe), torch.nn.functional.linear(probe[None], weight)[0])


def _called(model: Any, function: Callable[[], Readings]) -> Readings:
    """Run a function in place of the model's forward, inside one call of the model.

    A sharded model has gathered its weights inside that call, and the function uses body and head separately. The head
    is used again in the backward pass.
    """

    def forward(_: None) -> Readings:
        del model.forward
        return function()

    model.forward = forward
    try:
        # The call has an argument because FSDP on GPUs looks for arguments to move to the device.
        found: Readings = model(None)
        return found
    finally:
        model.__dict__.pop("forward", None)


def _chunks(inverse: Index, size: int, row: MicroBatch, kept: Kept | None, device: torch.device) -> Iterator[Wanted]:
    """Yield the plan of the targets of each chunk of `size` positions."""
    order = np.argsort(inverse, kind="stable")
    for start in range(0, int(inverse.max()) + 1, size):
        first, last = np.searchsorted(inverse[order], [start, start + size])
        mine = order[first:last]
        yield Wanted.of(mine, inverse[mine] - start, row, kept, device)


def _in_chunks(
    model: Any,
    hidden: torch.Tensor,
    chunks: list[Wanted],
    size: int,
    temperature: float | torch.Tensor,
    entropy: EntropyOf,
    top: torch.Tensor | Likeliest | None,
) -> Readings:
    wide = WideHead(model)

    def piece(chunk: torch.Tensor, wanted: Wanted, scale: float | torch.Tensor, further: Any) -> Readings:
        with wide.in_force():
            logits = _head(model, chunk)
        return read(logits, wanted, scale, entropy, further)

    found = []
    for i, wanted in enumerate(chunks):
        mine = slice(i * size, (i + 1) * size)
        scale = temperature[mine] if isinstance(temperature, torch.Tensor) else temperature
        further = top[mine] if isinstance(top, torch.Tensor) else top
        found.append(
            checkpoint(piece, hidden[mine], wanted, scale, further, use_reentrant=False, preserve_rng_state=False)
        )
    back = upload(np.argsort(np.concatenate([wanted.targets for wanted in chunks])), hidden.device)
    joined: list[Any] = [None if parts[0] is None else torch.cat(parts)[back] for parts in zip(*found, strict=True)]
    return Readings(*joined)


class _Body(torch.nn.Module):
    """A stand-in for a model's body that returns given hidden states, so that only the head runs."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.last_hidden_state)


class _Output:
    """The output of the stand-in body. All optional parts are absent."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def _head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits of hidden states [n, d], through everything that the model itself does after its body."""
    name = model.base_model_prefix
    body = model._modules[name]
    model._modules[name] = _Body(hidden[None])
    try:
        logits: torch.Tensor = model.forward(input_ids=None, use_cache=False).logits[0]
    finally:
        model._modules[name] = body
    return logits


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
    """Return the log-probability of every target, [M], differentiable, from hidden states [n, d] and a head [V, d]."""
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
        # The gradient at the logit of a chosen token, in which that of the softmax is included: it replaces that below.
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
