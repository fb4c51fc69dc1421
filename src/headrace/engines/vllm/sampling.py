"""The requests that vLLM can serve, in its own sampling parameters, and what its answers must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.engines.base import KEPT_LIMIT, Request, Sampling
from headrace.engines.requests import request_refusal
from headrace.engines.vllm.client import AnswerPiece
from headrace.engines.vllm.server import KEPT, NOISE
from headrace.errors import ChannelError
from headrace.types import Kept
from headrace_vllm_plugin.wire import TRUNCATION, Facts

KEPT_HINT = f"{KEPT} lets it say so, with vLLM's second model runner, which needs a GPU"

FORBID = -1e30
"""The bias that is added to the logit of a forbidden token. Its probability becomes 0 in float32, and JSON can express
this number, unlike -inf."""


def joined(pieces: Sequence[AnswerPiece], layers: Sequence[int]) -> AnswerPiece:
    """Join all pieces of a stream. The last one has the experts of all layers, of which these layers are kept."""
    last = pieces[-1]
    token_ids = [token for piece in pieces for token in piece.token_ids]
    if last.experts is not None and last.experts.shape[1] <= max(layers):
        raise ChannelError(f"a server sent the experts of {last.experts.shape[1]} layers, not of layer {max(layers)}")
    experts = None if last.experts is None else last.experts[:, list(layers)]
    rows = 0 if experts is None else len(experts)
    if rows < len(token_ids):
        raise ChannelError(f"a server sent {len(token_ids)} tokens with the experts of {rows}")
    return AnswerPiece(
        token_ids=token_ids,
        logprobs=[logprob for piece in pieces for logprob in piece.logprobs],
        finish=last.finish,
        spans=last.spans,
        kept=[each for piece in pieces for each in piece.kept or []] if any(piece.kept for piece in pieces) else None,
        experts=experts,
    )


def refusal(request: Request, facts: Facts, max_length: int) -> str:
    """Return why this request cannot be served, or an empty string if it can."""
    if reason := request_refusal(request, facts.vocabulary, max_length):
        return reason
    if request.sampling.record_kept and not facts.kept:
        return f"record_kept: this vLLM server cannot say which tokens truncation kept ({KEPT_HINT})"
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
    temperature = sampling.temperature
    if facts.truncation and _together(sampling):
        rules = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "extra_args": {TRUNCATION: rules}}
    elif facts.kept and temperature == 0:
        # Such a server draws nothing greedily. The best token alone is the same token.
        temperature, rules = 1.0, {"top_k": 1}
    elif facts.kept:
        most = KEPT_LIMIT if sampling.record_kept else facts.vocabulary
        rules["top_k"] = min(sampling.top_k or most, most, facts.vocabulary)
    return {
        "max_tokens": max_tokens,
        "temperature": temperature,
        **rules,
        "seed": sampling.seed & (1 << 63) - 1,
        "stop_token_ids": sorted({*sampling.stop_token_ids, *singles}),
        "logit_bias": forbidden or None,
        "logprobs": 0,
        "ignore_eos": True,
        "detokenize": False,
        "skip_special_tokens": False,
    }


def kept_sets(sampling: Sampling, count: int, kept: list[list[int]] | None) -> Kept:
    """Return the kept sets of the first `count` tokens. Greedy sampling truncates nothing."""
    if sampling.temperature == 0:
        return Kept(counts=np.zeros(count, np.int32), token_ids=np.zeros(0, np.int32))
    # A forbidden token has a probability of 0, and the server does not know that it was cut.
    sets = [sorted(set(each) - set(sampling.forbidden)) for each in (kept or [])[:count]]
    if len(sets) != count:
        raise ChannelError(f"a server sent {count} tokens with {len(sets)} kept sets")
    return Kept(
        counts=np.array([len(each) for each in sets], np.int32),
        token_ids=np.array([token for each in sets for token in each], np.int32),
    )


def wrong_version(piece: AnswerPiece, version: int) -> str:
    """Return what is wrong with the versions that the server reports for the tokens, or an empty string."""
    found = sorted({span.version for span in piece.spans or []})
    if found in ([], [str(version)]):
        return ""
    return f"the server drew under version {', '.join(found)} what was asked of version {version}"


def _together(sampling: Sampling) -> bool:
    """Return whether `min_p` is combined with another truncation. Greedy sampling truncates nothing."""
    return sampling.temperature > 0 and sampling.min_p > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
