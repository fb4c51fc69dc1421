"""Which tokens `top_k`, `top_p` and `min_p` leave where they come together: in Headrace's order, each of the rest.

vLLM has `min_p` look first, so that its `top_p` is of another whole. Here `top_p` is of what `top_k` left, and `min_p`
looks last. The best token always stays.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from headrace_vllm_plugin.wire import TRUNCATION, Truncation

GREEDY = 1e-5
"""Below this temperature vLLM takes the best token, and its log-probability is that among all."""


def wanted(params: Any) -> Truncation | None:
    """What these `SamplingParams` ask of us; raises `ValueError` where it makes no sense."""
    given = (params.extra_args or {}).get(TRUNCATION)
    if given is None or params.temperature < GREEDY:
        return None
    return msgspec.convert(given, Truncation)


def truncate(logits: torch.Tensor, rows: dict[Truncation, list[int]]) -> None:
    """Leave minus infinity in the place of every token of these rows that is cut; logits [R, V] are tempered."""
    for rule, mine in rows.items():
        logits[mine] = logits[mine].masked_fill(~kept(logits[mine], rule), float("-inf"))


def kept(logits: torch.Tensor, rule: Truncation) -> torch.Tensor:
    """[R, V]: the tokens that stay; of those that are equally likely at an edge, the ones of the lowest ids."""
    masses = (logits - logits.amax(-1, keepdim=True)).exp()
    # A stable sort leaves equals in the order of their ids.
    ids = logits.sort(dim=-1, descending=True, stable=True).indices
    falling = masses.gather(1, ids).double()
    if rule.top_k:
        falling[:, rule.top_k :] = 0
    stays = falling > 0
    if rule.top_p < 1:
        before = falling.cumsum(-1) - falling
        stays &= before < rule.top_p * falling.sum(-1, keepdim=True)
    # The best token's mass is one.
    return torch.zeros_like(stays).scatter_(1, ids, stays) & (masses >= rule.min_p)
