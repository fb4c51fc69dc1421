"""Checks the recorded log-probabilities against the plain model.

The plain model, called the twin, has the same parameters as the engine but another code path: Hugging Face's own
attention over one whole row at a time, without cache and packing. Errors are measured against the same weights in
float32, so that they are the errors of the engine alone. For comparison, the error of the twin in its own dtype is
measured too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from headrace.bench.engine_drive import DrawnAnswer
from headrace.engines.base import Sampling
from headrace.models.head import float32_head
from headrace.types import Float32Array, Int32Array

_ROWS = 512
"""The number of positions whose whole distributions exist at the same time."""


def plain_twin(model: Any) -> Any:
    """Return a model with the same parameters and Hugging Face's own attention.

    Call this before an engine is made, because an engine changes the model.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()}
    twin = copy.deepcopy(model, shared)
    twin.set_attn_implementation("sdpa" if getattr(twin, "_supports_sdpa", False) else "eager")
    return twin


def chosen_rows(count: int, share: float) -> list[int]:
    """Return this share of the rows, and at least one, spread evenly over the batch."""
    wanted = min(count, max(1, round(count * share)))
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


def exact_twin(twin: Any) -> Any:
    """Return a plain model with the same weights in float32; the twin itself if its dtype is float32."""
    return twin if twin.dtype == torch.float32 else copy.deepcopy(twin).float()


def rescore(
    twin: Any, prompts: list[Int32Array], answers: list[DrawnAnswer], rows: list[int], sampling: Sampling
) -> dict[str, Any]:
    """Compare the recorded log-probabilities of these rows with those of the same weights in float32.

    `outside` counts the tokens that truncation (top-k, top-p) leaves out in float32, although the engine sampled them.
    They have no log-probability in float32, so they are not among the errors.
    """
    exact = exact_twin(twin)
    errors, plain, outside = [], [], 0
    for row in rows:
        expected = row_logprobs(exact, prompts[row], answers[row].token_ids, sampling)
        own = row_logprobs(twin, prompts[row], answers[row].token_ids, sampling)
        both = ~np.isneginf(expected) & ~np.isneginf(own)
        plain.append(np.abs(expected[both] - own[both]))
        # At the edge of a truncated distribution, rounding decides whether a token is inside. Tokens outside are
        # counted, but have no error.
        inside = ~np.isneginf(expected)
        outside += int((~inside).sum())
        errors.append(np.abs(expected[inside] - answers[row].logprobs[inside]))
    joined = np.concatenate(errors)
    return {
        "rows": len(rows),
        "tokens": len(joined) + outside,
        "mean_error": float(joined.mean()) if len(joined) else 0.0,
        "max_error": float(joined.max(initial=0.0)),
        "outside": outside,
        "plain_mean_error": float(np.concatenate(plain).mean()) if len(joined) else 0.0,
    }


@torch.inference_mode()
def row_logprobs(twin: Any, prompt: Int32Array, answer: Int32Array, sampling: Sampling) -> Float32Array:
    """Return the log-probability of every token of the answer, under the distribution that was sampled from."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).to(twin.device)
    with float32_head(twin):
        logits = twin(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0]
    return logprobs_of(logits, ids[len(prompt) :], sampling)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> Float32Array:
    """Return the log-probabilities of `tokens` [n] under `logits` [n, V], after temperature, top-k and then top-p."""
    found = [
        sampled_distribution(part, sampling).gather(1, mine[:, None])[:, 0]
        for part, mine in zip(_parts(logits), _parts(tokens), strict=True)
    ]
    return np.asarray(torch.cat(found).cpu().numpy(), np.float32)


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the log-probabilities [n, V] of the sampling distribution; minus infinity where truncation cuts."""
    logprobs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p == 1):
        return logprobs
    ordered, ids = logprobs.sort(-1, descending=True)
    if 0 < sampling.top_k < logits.shape[-1]:
        ordered[:, sampling.top_k :] = float("-inf")
        ordered = torch.log_softmax(ordered, -1)
    if sampling.top_p < 1:
        mass = ordered.double().exp()
        left_out = mass.cumsum(-1) - mass >= sampling.top_p
        left_out[:, 0] = False
        ordered = torch.log_softmax(ordered.masked_fill(left_out, float("-inf")), -1)
    return torch.empty_like(ordered).scatter_(1, ids, ordered)


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from torch.split(rows, _ROWS)
