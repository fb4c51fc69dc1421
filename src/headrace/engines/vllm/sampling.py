"""From our sampling to vLLM's: passed whole, or refused in one line. Pure arithmetic.

End tokens are ours to name: vLLM stops at no token that the request does not list. Stop sequences are recognised here,
token by token, because vLLM knows them only as text. What several rules together leave is found by our plugin, because
vLLM applies them in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.base import Request, Sampling, sampling_refusal
from headrace.engines.vllm.checks import NOISE
from headrace_vllm_plugin.wire import TRUNCATION, Facts

FORBID = -1e30
"""Added to the logit of a forbidden token: its probability is 0 in float32, and JSON can say it."""


def refusal(request: Request, facts: Facts, max_length: int) -> str:
    """Why this request cannot be served, or nothing."""
    ids, vocabulary = request.token_ids, facts.vocabulary
    if len(ids) == 0:
        return "its prompt has no tokens"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"its prompt holds a token id outside of the vocabulary of {vocabulary}"
    if len(ids) >= max_length:
        return f"its prompt of {len(ids)} tokens leaves no room under the longest length of {max_length}"
    if request.sampling.record_kept:
        return "record_kept: this vLLM server cannot say which tokens truncation kept"
    if reason := sampling_refusal(request.sampling, vocabulary):
        return reason
    # The order of `top_k` and `min_p` alone makes no difference: what both would leave stays.
    if not facts.truncation and _together(request.sampling) and request.sampling.top_p < 1:
        return (
            "min_p together with top_p: vLLM's second model runner applies them in another order; start the server "
            f"with VLLM_USE_V2_MODEL_RUNNER=0 in its environment and --logits-processors {NOISE}"
        )
    return ""


def sampling_params(sampling: Sampling, max_tokens: int, facts: Facts) -> dict[str, Any]:
    """VLLM's `SamplingParams` for the next `max_tokens` tokens, with the sampled tokens' log-probabilities."""
    forbidden = {str(token): FORBID for token in sampling.forbidden if 0 <= token < facts.vocabulary}
    singles = [stop[0] for stop in sampling.stop_sequences if len(stop) == 1]
    rules: dict[str, Any] = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    if facts.truncation and _together(sampling):
        rules = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "extra_args": {TRUNCATION: rules}}
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        **rules,
        "seed": sampling.seed & (1 << 63) - 1,
        "stop_token_ids": sorted({*sampling.stop_token_ids, *singles}),
        "logit_bias": forbidden or None,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def _together(sampling: Sampling) -> bool:
    """Whether `min_p` and others cut; where nothing is drawn nothing is cut."""
    return sampling.temperature > 0 and sampling.min_p > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def first_stop(tokens: Sequence[int], known: int, sampling: Sampling) -> int | None:
    """How many of the sampled `tokens` there are at the first stop after the `known` first ones, if there is one."""
    for count in range(known + 1, len(tokens) + 1):
        if tokens[count - 1] in sampling.stop_token_ids:
            return count
        for stop in sampling.stop_sequences:
            if len(stop) <= count and tuple(tokens[count - len(stop) : count]) == stop:
                return count
    return None
