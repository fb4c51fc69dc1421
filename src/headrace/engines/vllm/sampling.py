"""From our sampling to vLLM's: passed whole, or refused in one line. Pure arithmetic.

End tokens are ours to name: vLLM stops at no token that the request does not list. Stop sequences are recognised here,
token by token, because vLLM knows them only as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engines.base import Request, Sampling, sampling_refusal

FORBID = -1e30
"""Added to the logit of a forbidden token: its probability is 0 in float32, and JSON can say it."""


def refusal(request: Request, vocabulary: int, max_length: int) -> str:
    """Why this request cannot be served, or nothing."""
    ids = request.token_ids
    if len(ids) == 0:
        return "its prompt has no tokens"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"its prompt holds a token id outside of the vocabulary of {vocabulary}"
    if len(ids) >= max_length:
        return f"its prompt of {len(ids)} tokens leaves no room under the longest length of {max_length}"
    if request.sampling.record_kept:
        return "record_kept: this vLLM server cannot say which tokens truncation kept"
    return sampling_refusal(request.sampling, vocabulary)


def sampling_params(sampling: Sampling, max_tokens: int, vocabulary: int) -> dict[str, Any]:
    """VLLM's `SamplingParams` for the next `max_tokens` tokens, with the sampled tokens' log-probabilities."""
    forbidden = {str(token): FORBID for token in sampling.forbidden if 0 <= token < vocabulary}
    singles = [stop[0] for stop in sampling.stop_sequences if len(stop) == 1]
    return {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed & (1 << 63) - 1,
        "stop_token_ids": sorted({*sampling.stop_token_ids, *singles}),
        "logit_bias": forbidden or None,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def first_stop(tokens: Sequence[int], known: int, sampling: Sampling) -> int | None:
    """How many of the sampled `tokens` there are at the first stop after the `known` first ones, if there is one."""
    for count in range(known + 1, len(tokens) + 1):
        if tokens[count - 1] in sampling.stop_token_ids:
            return count
        for stop in sampling.stop_sequences:
            if len(stop) <= count and tuple(tokens[count - len(stop) : count]) == stop:
                return count
    return None
