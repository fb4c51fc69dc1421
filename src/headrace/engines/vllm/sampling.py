"""Translates our sampling settings into vLLM's, completely, or refuses them in one line. It is pure arithmetic.

vLLM stops only at the stop tokens that the request lists. Stop sequences are found here, token by token, because vLLM
knows them only as text. If several truncation rules are combined, our plugin applies them, because vLLM applies them in
another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.base import Request, Sampling, sampling_refusal
from headrace.engines.vllm.checks import NOISE
from headrace_vllm_plugin.wire import TRUNCATION, Facts

FORBID = -1e30
"""The bias that is added to the logit of a forbidden token. Its probability becomes 0 in float32, and JSON can express
this number, unlike -inf."""


def refusal(request: Request, facts: Facts, max_length: int) -> str:
    """Return why this request cannot be served, or an empty string if it can."""
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
    # The order of `top_k` and `min_p` alone makes no difference: the tokens that both keep are kept.
    if not facts.truncation and _together(request.sampling) and request.sampling.top_p < 1:
        return (
            "min_p together with top_p: vLLM's second model runner applies them in another order; start the server "
            f"with VLLM_USE_V2_MODEL_RUNNER=0 in its environment and --logits-processors {NOISE}"
        )
    return ""


def sampling_params(sampling: Sampling, max_tokens: int, facts: Facts) -> dict[str, Any]:
    """Return vLLM's `SamplingParams` for the next `max_tokens` tokens, which ask for log-probabilities too."""
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
    """Return whether `min_p` is combined with another truncation. Greedy sampling truncates nothing."""
    return sampling.temperature > 0 and sampling.min_p > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def first_stop(tokens: Sequence[int], known: int, sampling: Sampling) -> int | None:
    """Return the number of sampled `tokens` up to and including the first stop, or None if there is no stop.

    The first `known` tokens were checked before and are not checked again.
    """
    for count in range(known + 1, len(tokens) + 1):
        if tokens[count - 1] in sampling.stop_token_ids:
            return count
        for stop in sampling.stop_sequences:
            if len(stop) <= count and tuple(tokens[count - len(stop) : count]) == stop:
                return count
    return None
