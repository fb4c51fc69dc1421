"""Log-probabilities where they are trained, and nowhere else.

The model's own head code makes the logits (some models cap or scale them), the softmax is taken in float32 at the
sampling temperature, and logits never exist for more than `CHUNK_ELEMENTS` at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from headrace.models.attention import attending
from headrace.training.attention import PackedAttention
from headrace.training.packing import MicroBatch

CHUNK_ELEMENTS = 1 << 26
"""Logits held at once (256 MiB in float32); a row with more is computed in pieces, and again in its backward pass."""


def row_logprobs(model: Any, row: MicroBatch, *, temperature: float = 1.0) -> torch.Tensor:
    """The log-probability of every target of a row, [M], differentiable. The model is not changed."""
    device = next(model.parameters()).device
    # Answers to one prompt share the position that predicts their first token: its logits are made once.
    places, inverse = torch.unique(torch.from_numpy(row.predictors), return_inverse=True)
    targets = torch.from_numpy(row.targets).to(device)
    places, inverse = places.to(device), inverse.to(device)
    inputs = {
        "input_ids": torch.from_numpy(row.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(row.position_ids)[None].to(device),
        "use_cache": False,
    }
    rows_at_once = max(1, CHUNK_ELEMENTS // int(model.get_output_embeddings().weight.shape[0]))
    with attending(PackedAttention(row)):
        if len(places) <= rows_at_once:
            logits = model(**inputs, logits_to_keep=places).logits[0]
            return _selected(logits, inverse, targets, temperature)
        hidden = model.base_model(**inputs).last_hidden_state[0, places]
    return _in_chunks(model, hidden, inverse, targets, temperature, rows_at_once)


def _selected(logits: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits = logits / temperature
    return logits[rows, targets] - logits.logsumexp(dim=-1)[rows]


def _in_chunks(
    model: Any, hidden: torch.Tensor, inverse: torch.Tensor, targets: torch.Tensor, temperature: float, size: int
) -> torch.Tensor:
    found, order = [], []
    for start in range(0, len(hidden), size):
        mine = ((inverse >= start) & (inverse < start + size)).nonzero()[:, 0]
        chunk = hidden[start : start + size]

        def read(chunk: torch.Tensor, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return _selected(_head(model, chunk), rows, wanted, temperature)

        found.append(checkpoint(read, chunk, inverse[mine] - start, targets[mine], use_reentrant=False))
        order.append(mine)
    return torch.cat(found)[torch.cat(order).argsort()]


class _Body(torch.nn.Module):
    """Stands in for a model's body when only its head is to run: answers with hidden states that are there already."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.last_hidden_state = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.last_hidden_state)


class _Output:
    """The output of a body, all of whose optional parts are absent."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise IndexError(index)
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def _head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of hidden states [n, d], through everything that the model itself does after its body."""
    name = model.base_model_prefix
    body = model._modules[name]
    model._modules[name] = _Body(hidden[None])
    try:
        logits: torch.Tensor = model(input_ids=None, use_cache=False).logits[0]
    finally:
        model._modules[name] = body
    return logits
