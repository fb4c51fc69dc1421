"""Checks the recorded log-probabilities and the version tags of an engine's tokens against the plain model.

The plain model, called the twin, has the same parameters as the engine but another code path: Hugging Face's own
attention over one whole row at a time, without packing. Errors are measured against the same weights in float32, so
that they are the errors of the engine alone. For comparison, the error of the twin in its own dtype is measured too.
"""

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, DynamicCache, TopKLogitsWarper, TopPLogitsWarper
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from headrace.bench.base import Weights
from headrace.engines.base import Delta, Request, Sampling
from headrace.errors import UserError
from headrace.models.fp8 import through_fp8
from headrace.models.head import float32_head
from headrace.models.loading import named_weights
from headrace.types import Float32Array, Int32Array

TAG_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15}
"""If a log-probability differs by more than this from that of the tagged version, the tag is wrong."""
_ROWS = 512
"""The number of positions whose whole distributions exist at the same time."""

Row = tuple[Request, Delta]
"""A request, and all its tokens as one delta."""


ROUNDED_KV = "headrace_rounded_kv"
"""The name of torch's attention over keys and values that were rounded to FP8."""


def _rounded_kv(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any, **named: Any
) -> Any:
    return sdpa_attention_forward(module, query, through_fp8(key), through_fp8(value), *given, **named)


AttentionInterface.register(ROUNDED_KV, _rounded_kv)
AttentionMaskInterface.register(ROUNDED_KV, sdpa_mask)


def plain_twin(model: Any, *, rounds_kv: bool = False) -> Any:
    """Return a model with the same parameters and Hugging Face's own attention.

    With `rounds_kv` it attends over keys and values that are rounded to FP8. Call this before an engine is made,
    because an engine changes the model.
    """
    shared: dict[int, Any] = {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()}
    twin = copy.deepcopy(model, shared)
    torch_attention = ROUNDED_KV if rounds_kv else "sdpa"
    if rounds_kv and not getattr(twin, "_supports_sdpa", False):
        raise UserError(f"--kv-dtype: {type(model).__name__} cannot be scored again with rounded keys and values")
    twin.set_attn_implementation(torch_attention if getattr(twin, "_supports_sdpa", False) else "eager")
    return twin


class _WidenedLayer(torch.nn.Module):
    """A layer that computes in float32 with the weights of another layer, of which it makes a copy for each pass."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        # In a tuple, so that it is no part of this module: `float()` on the model must not change the layer itself.
        self._narrow = (layer,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._narrow[0], name)

    def forward(self, *given: Any, **named: Any) -> Any:
        return copy.deepcopy(self._narrow[0]).float()(*given, **named)


def widened_twin(twin: Any) -> Any:
    """Return the twin in float32. The decoder layers are widened one at a time, so that a large model fits too."""
    layers: dict[int, Any] = {id(layer): _WidenedLayer(layer) for layer in getattr(twin.get_decoder(), "layers", [])}
    return copy.deepcopy(twin, layers).float()


@torch.inference_mode()
def install(model: Any, weights: Weights) -> None:
    """Copy these weights over those of the model."""
    for name, tensor in named_weights(model).items():
        tensor.copy_(weights[name])


def chosen_rows(requests: Sequence[Request], answers: Sequence[Delta], share: float) -> list[Row]:
    """Return this share of the rows, and at least one, spread evenly over the batch."""
    count = len(requests)
    wanted = min(count, max(1, round(count * share)))
    chosen = [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]
    return [(requests[i], answers[i]) for i in chosen]


def rescore(twin: Any, rows: list[Row]) -> dict[str, Any]:
    """Compare the recorded log-probabilities of these rows with those of the same weights in float32.

    `outside` counts the tokens that top-k or top-p leaves out in float32, although the engine sampled them. They have
    no log-probability in float32, so they are not among the errors.
    """
    exact = twin if twin.dtype == torch.float32 else widened_twin(twin)
    expected, own = (
        np.concatenate([row_logprobs(model, request, answer.token_ids) for request, answer in rows])
        for model in (exact, twin)
    )
    # At the edge of a truncated distribution, rounding decides whether a token is inside.
    inside = ~np.isneginf(expected)
    errors = _distances(expected, np.concatenate([answer.logprobs for _, answer in rows]), inside)
    plain = _distances(expected, own, inside & ~np.isneginf(own))
    return {
        "rows": len(rows),
        "tokens": len(expected),
        "mean_error": _mean(errors),
        "max_error": float(errors.max(initial=0.0)),
        "outside": int((~inside).sum()),
        "plain_mean_error": _mean(plain),
    }


@torch.inference_mode()
def divergence(twin: Any, other: Any, rows: list[Row]) -> float:
    """Return the mean KL divergence of the twin's distribution from the other model's, over the tokens of these rows.

    For each token it is the sum over the vocabulary of p log(p / q), where p is the twin's.
    """
    found = []
    for request, answer in rows:
        ids = torch.from_numpy(np.concatenate([request.token_ids, answer.token_ids]).astype(np.int64)).to(twin.device)
        given = {"input_ids": ids[None, :-1], "use_cache": False, "logits_to_keep": len(answer.token_ids)}
        with float32_head(twin), float32_head(other):
            logits = [model(**given).logits[0] for model in (twin, other)]
        for part in zip(*(torch.split(each, _ROWS) for each in logits), strict=True):
            p, q = (torch.log_softmax(each.float(), -1) for each in part)
            found.append(torch.sum(p.exp() * (p - q), -1))
    return float(torch.cat(found).mean())


def check_tags(twin: Any, sets: Sequence[Weights], answers: list[Delta], rows: list[Row], dtype: str) -> dict[str, Any]:
    """Count the tokens whose tag cannot be right: smaller than the tag before, or with another log-probability.

    The order of tags is checked in all `answers`. Only `rows` are replayed under the versions of their tags.
    """
    backwards = sum(int((np.diff(answer.versions) < 0).sum()) for answer in answers)
    expected, wrong = (
        np.concatenate([replay(twin, sets, request, answer, off_by=off) for request, answer in rows]) for off in (0, 1)
    )
    recorded = np.concatenate([answer.logprobs for _, answer in rows])
    # Minus infinity means that truncation leaves the token out: by rounding at the edge, or because the tag is wrong.
    inside = ~np.isneginf(expected)
    errors = _distances(expected, recorded, inside)
    return {
        "mis_tagged": backwards + int((errors > TAG_TOLERANCE[dtype]).sum()),
        "replayed_tokens": len(expected),
        "replayed_outside": int((~inside).sum()),
        "versions_seen": len({int(v) for answer in answers for v in np.unique(answer.versions)}),
        "replay_max_error": float(errors.max(initial=0.0)),
        "replay_mean_error": _mean(errors),
        # The mean error if all tags were wrong by one. It must be far above rounding, or the check could find nothing.
        "other_version_mean_error": _mean(_distances(wrong, recorded, ~np.isneginf(wrong))),
    }


@torch.inference_mode()
def replay(twin: Any, sets: Sequence[Weights], request: Request, answer: Delta, off_by: int = 0) -> Float32Array:
    """Return the log-probabilities of an answer whose inputs go through the weights of their tags.

    The engine keeps keys and values across swaps, so a row holds those of several versions. The twin repeats this with
    a cache of its own. `off_by` is added to every tag.
    """
    prompt = request.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, answer.token_ids]).astype(np.int64)).to(twin.device)
    cache, fed, found = DynamicCache(config=twin.config), 0, []
    for version, stretch in groupby(answer.versions.tolist()):
        install(twin, sets[(version + off_by) % 2])
        drawn = len(list(stretch))
        end = max(fed, len(prompt) - 1) + drawn
        with float32_head(twin):
            output = twin(input_ids=ids[None, fed:end], past_key_values=cache, use_cache=True, logits_to_keep=drawn)
        found.append(logprobs_of(output.logits[0], ids[end - drawn + 1 : end + 1], request.sampling))
        fed = end
    return np.concatenate(found)


@torch.inference_mode()
def row_logprobs(twin: Any, request: Request, answer: Int32Array) -> Float32Array:
    """Return the log-probability of every token of the answer, under the distribution that was sampled from."""
    ids = torch.from_numpy(np.concatenate([request.token_ids, answer]).astype(np.int64)).to(twin.device)
    with float32_head(twin):
        logits = twin(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0]
    return logprobs_of(logits, ids[len(request.token_ids) :], request.sampling)


def score_canary(twin: Any, tokens: Int32Array) -> Float32Array:
    """Return the log-probabilities of all tokens of the canary but the first."""
    return row_logprobs(twin, Request(id="", token_ids=tokens[:1], sampling=Sampling(max_tokens=1)), tokens[1:])


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling) -> Float32Array:
    """Return the log-probabilities of `tokens` [n] under `logits` [n, V], after temperature, top-k and then top-p."""
    found = [
        sampled_distribution(part, sampling).gather(1, mine[:, None])[:, 0]
        for part, mine in zip(torch.split(logits, _ROWS), torch.split(tokens, _ROWS), strict=True)
    ]
    return np.asarray(torch.cat(found).cpu().numpy(), np.float32)


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the log-probabilities [n, V] of the sampling distribution; minus infinity where truncation cuts."""
    if sampling.temperature == 0 or (sampling.top_k == 0 and sampling.top_p == 1):
        return torch.log_softmax(logits.float() / (sampling.temperature or 1.0), -1)
    # In double precision, because the sum of all masses decides which tokens top-p keeps.
    scores: Any = logits.double() / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.log_softmax(scores, -1)


def _distances(one: Float32Array, other: Float32Array, where: npt.NDArray[np.bool_]) -> Float32Array:
    found: Float32Array = np.abs(one[where] - other[where])
    return found


def _mean(errors: Float32Array) -> float:
    return float(errors.mean()) if len(errors) else 0.0
