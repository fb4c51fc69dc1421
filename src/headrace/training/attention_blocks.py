"""Attention by its definition, and its gradient by hand: one block of queries over one block of keys.

This is the reference for every kernel, and the path for what no kernel here supports: capped scores, sinks, and windows
that end within a shared prefix. The gradient needs no autograd, so it can run inside an operation that a compiler does
not look into.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from headrace.models.attention import AttentionCall


class BlockGradients(NamedTuple):
    """The gradients of one block: query [1, H, n, D], key [1, K, m, D], value [1, K, m, Dv], sinks [H]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None


def attend_block(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [1, H, n, D] x [1, K, m, D] -> the output [1, H, n, Dv] and the log-sum-exp of its scores [H, n]."""
    heads, n = query.shape[1:3]
    scores, _ = _scores(query, key, mask, call)
    lse = scores.logsumexp(dim=-1)
    if call.sinks is not None:
        # A sink takes its share of the attention and contributes nothing to the output.
        lse = torch.logaddexp(lse, _by_group(call.sinks, key, lse.dtype))
    probabilities = (scores - lse[..., None]).exp()
    output = torch.matmul(probabilities.to(value.dtype), value.unsqueeze(2))
    return output.reshape(1, heads, n, -1), lse.reshape(heads, n)


def attend_block_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    lse: torch.Tensor,
    gradient: torch.Tensor,
) -> BlockGradients:
    """Return the gradients of the inputs, given the gradient of the output, [1, H, n, Dv].

    They have the dtype of `lse`.
    """
    kv_heads, precise = key.shape[1], lse.dtype
    scores, slope = _scores(query, key, mask, call)
    grouped = _grouped(query, kv_heads).to(precise)
    of_output = _grouped(gradient, kv_heads).to(precise)
    sums = _grouped(lse[None, ..., None], kv_heads)
    probabilities = (scores - sums).exp()
    of_probabilities = torch.matmul(of_output, value.to(precise).unsqueeze(2).transpose(-1, -2))
    # All scores of a query have this term in common, because the query's probabilities add up to one.
    common = (probabilities * of_probabilities).sum(dim=-1, keepdim=True)
    of_scores = probabilities * (of_probabilities - common)
    if slope is not None:
        of_scores = of_scores * slope
    of_scores = of_scores * call.scaling
    return BlockGradients(
        query=torch.matmul(of_scores, key.to(precise).unsqueeze(2)).reshape(query.shape),
        key=torch.matmul(of_scores.transpose(-1, -2), grouped).sum(dim=2),
        value=torch.matmul(probabilities.transpose(-1, -2), of_output).sum(dim=2),
        sinks=None if call.sinks is None else _of_sinks(call.sinks, key, sums, common),
    )


def _scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masked scores, [1, K, H / K, n, m] in float32 at least, and the slope of their cap, if they are capped."""
    n = query.shape[2]
    scores = torch.matmul(_grouped(query, key.shape[1]), key.unsqueeze(2).transpose(-1, -2)) * call.scaling
    slope = None
    if call.softcap is not None:
        bent = torch.tanh(scores / call.softcap)
        scores, slope = bent * call.softcap, 1 - bent.square()
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~mask, float("-inf")).to(torch.promote_types(scores.dtype, torch.float32)), slope


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape [1, H, ...] to [1, K, H / K, ...]."""
    return x.reshape(1, kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


def _by_group(sinks: torch.Tensor, key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return sinks.to(dtype).reshape(1, key.shape[1], -1, 1)


def _of_sinks(sinks: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the sinks.

    The value of a sink is zero: a sink only takes attention from the other tokens.
    """
    share = (_by_group(sinks, key, lse.dtype)[..., None] - lse).exp()
    return -(share * common).sum(dim=(-1, -2)).reshape(-1)
