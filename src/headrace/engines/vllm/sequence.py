"""One request of a vLLM engine: its tokens so far, and its sampling settings in vLLM's terms.

A request that is recalled continues from its last token. Tokens that were handed out are never drawn again.

Sampling settings are translated completely, or refused in one line. vLLM stops only at the stop tokens that the request
lists. Stop sequences are found here, token by token, because vLLM knows them only as text. If several truncation rules
are combined, our plugin applies them, because vLLM applies them in another order.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.engines.base import Delta, FinishReason, Request, Sampling, token_delta
from headrace.engines.requests import first_stop, request_refusal
from headrace.engines.vllm.checks import NOISE
from headrace.engines.vllm.client import AnswerPiece
from headrace.types import NO_VERSION
from headrace_vllm_plugin.wire import TRUNCATION, Facts

_FINISHES: dict[str, FinishReason] = {"length": "length", "stop": "stop"}

Cut = Literal["", "recall", "abort"]
"""Why a stream is ended from our side. `recall`: the request continues later. `abort`: the request ends."""

FORBID = -1e30
"""The bias that is added to the logit of a forbidden token. Its probability becomes 0 in float32, and JSON can express
this number, unlike -inf."""


@dataclass(eq=False)
class VllmSequence:
    """A request and the tokens that were sampled for it."""

    request: Request
    order: int
    """The order of submission. Requests of equal priority are served in this order, also after a recall."""
    sampled: list[int] = field(default_factory=list)
    finished: bool = False
    """Whether the last delta was handed out."""
    cut: Cut = ""
    failures: int = 0
    """The number of streams that broke since the last token."""
    server_id: str = ""
    """The server's id of the stream that is open now."""
    task: asyncio.Task[None] | None = None

    def __lt__(self, other: VllmSequence) -> bool:
        return (self.request.priority, self.order) < (other.request.priority, other.order)

    @property
    def length(self) -> int:
        """The number of tokens, prompt included."""
        return len(self.request.token_ids) + len(self.sampled)

    def room(self, max_length: int) -> int:
        """Return how many tokens may still be sampled."""
        return min(self.request.sampling.max_tokens - len(self.sampled), max_length - self.length)

    def take(self, piece: AnswerPiece, version: int) -> Delta | None:
        """Add a piece and return the next delta, or None if there is nothing new.

        `finish` is set if a stop that we or the server found, or the length limit, ends the answer.
        """
        end = first_stop(piece.token_ids, self.request.sampling, self.sampled, len(self.sampled))
        finish: FinishReason | None = "stop" if end is not None else _FINISHES.get(piece.finish or "")
        tokens = piece.token_ids[:end]
        self.sampled += tokens
        self.finished = finish is not None
        if tokens:
            self.failures = 0
        if not tokens and finish is None:
            return None
        return token_delta(self.request.id, tokens, piece.logprobs[:end], version, finish)

    def ended(self, finish: FinishReason, error: str = "") -> Delta:
        """Make a last delta without tokens."""
        return token_delta(self.request.id, [], [], NO_VERSION, finish, error)


def refusal(request: Request, facts: Facts, max_length: int) -> str:
    """Return why this request cannot be served, or an empty string if it can."""
    if reason := request_refusal(request, facts.vocabulary, max_length):
        return reason
    if request.sampling.record_kept:
        return "record_kept: this vLLM server cannot say which tokens truncation kept"
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
