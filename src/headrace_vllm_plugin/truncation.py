"""Applies `top_k`, `top_p` and `min_p` together, in Headrace's order.

vLLM applies `min_p` first, so its `top_p` is a share of another total. Here `top_k` comes first, `top_p` is a share of
what `top_k` left, and `min_p` comes last. The best token always stays.
"""

from typing import Any

import msgspec
import torch

from headrace_vllm_plugin.wire import TRUNCATION, Truncation

GREEDY = 1e-5
"""Below this temperature vLLM takes the best token, and its log-probability is computed among all tokens."""


def wanted(params: Any) -> Truncation | None:
    """Return the truncation that these `SamplingParams` ask for; raises `ValueError` if it is invalid."""
    given = (params.extra_args or {}).get(TRUNCATION)
    if given is None or params.temperature < GREEDY:
        return None
    return msgspec.convert(given, Truncation)


def truncate(logits: torch.Tensor, rows: dict[Truncation, list[int]]) -> None:
    """Set the logits of all truncated tokens in these rows to minus infinity, in place.

    The logits [R, V] must already be divided by the temperature.
    """
    for rule, mine in rows.items():
        logits[mine] = logits[mine].masked_fill(~kept(logits[mine], rule), float("-inf"))


def kept(logits: torch.Tensor, rule: Truncation) -> torch.Tensor:
    """Return which tokens stay, as [R, V]; of equally likely tokens at an edge, those with the lowest ids stay."""
    masses = (logits - logits.amax(-1, keepdim=True)).exp()
    # A stable sort keeps equally likely tokens in the order of their ids.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices
    falling = masses.gather(1, ids).double()
    if rule.top_k:
        falling[:, rule.top_k :] = 0
    stays = falling > 0
    if rule.top_p < 1:
        before = falling.cumsum(-1) - falling
        stays &= before < rule.top_p * falling.sum(-1, keepdim=True)
    # The mass of the best token is 1, so `min_p` can be compared directly.
    return torch.zeros_like(stays).scatter_(1, ids, stays) & (masses >= rule.min_p)
