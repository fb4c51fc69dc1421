"""The engine protocol: prompts in, tokens out, with the version and log-probability of every token.

A forward pass of an engine sees exactly one version of the weights. An engine returns only tokens of versions that it
has proved. `tests/contract/test_engine.py` checks these rules on every implementation.

An engine of a user's own is named by `[engine] kind = "my_engine.py:MyEngine"`. `docs/extending.md` shows a small one.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec
import numpy as np

from headrace.delivery.base import Manifest, Proof
from headrace.types import NO_VERSION, Float32Array, Float64Array, Int16Array, Int32Array, Kept

Interrupt = Literal["never", "abort", "drain", "block"]
"""What happens to running requests when new weights arrive.

`never`: they continue under the new weights. `abort`: requests that have begun return what they have and are resumed
from that prefix. `drain`: requests that have begun finish before the swap, and no other request begins meanwhile.
`block`: all requests that were submitted earlier finish before the swap, and later requests wait for it.
"""

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""Why a request ended.

`stop`: a stop token or a stop sequence. `length`: the length limit. `aborted`: by `abort`; the partial completion is a
normal answer. `failed`: by an error, which is in `Delta.error`.
"""
KEPT_LIMIT = 1024
"""With `Sampling.record_kept`, a token is drawn from at most this many of the best tokens."""
FORBIDDEN_LIMIT = 32
"""The largest number of tokens that a request may forbid."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn. The noise of a token depends only on (seed, position), never on other sequences."""

    max_tokens: int
    temperature: float = 1.0
    """0 means greedy decoding; log-probabilities are then those of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    """Tokens less likely than this fraction of the most likely token are left out; 0 keeps all tokens."""
    forbidden: tuple[int, ...] = ()
    """Tokens that are never drawn, at most `FORBIDDEN_LIMIT`. Their probability is shared among the other tokens."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """When one of these tokens is sampled, the sequence ends; the token is part of the sequence."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """When the sampled tokens end with one of these, the sequence ends; the stop sequence is part of it."""
    step_token_ids: tuple[int, ...] = ()
    """Tokens that end a step. When one of them is sampled, the tokens so far are sent at once, and all deltas of the
    request say when their tokens were sampled. Only embedded engines do this; other engines send tokens as usual."""
    record_kept: bool = False
    """Record, for every sampled token, which tokens truncation kept: at most the best `KEPT_LIMIT`."""

    @property
    def recorded_temperature(self) -> float:
        """The temperature of the recorded log-probabilities, which is 1 for greedy decoding."""
        return self.temperature or 1.0


class Request(msgspec.Struct, kw_only=True):
    """One sequence to continue. To resume a partial completion, send a new request whose prompt includes its tokens."""

    id: str
    token_ids: Int32Array
    sampling: Sampling
    group: str = ""
    """Requests with the same group and the same prompt compute the prompt once."""
    priority: int = 0
    """A lower number is served first. Equal priorities are served in the order of submission."""
    parent: str = ""
    """The id of a running request whose keys and values are shared, as far as its tokens agree with this prompt.

    They are shared whatever version they were computed under.
    """
    version: int = NO_VERSION
    """The only version that may answer. A pool sends the request to engines that it holds at this version. With
    `NO_VERSION`, every engine that serves may answer."""


class Delta(msgspec.Struct, kw_only=True):
    """The next tokens of a request. The deltas of a running request are at most a quarter of a second apart."""

    id: str
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish: FinishReason | None = None
    """Why the request ended. Only the last delta has this field set, and that delta may hold no token."""
    error: str = ""
    kept: Kept | None = None
    """The tokens that truncation kept; set with `Sampling.record_kept`."""
    routing: Int16Array | None = None
    """[tokens, layers, k]: the experts that were chosen in the pass that drew each token (mixtures of experts only)."""
    times: Float64Array | None = None
    """When each token was sampled, in seconds of the engine's monotonic clock; set with `Sampling.step_token_ids`."""


class Sampler(Protocol):
    """Answers requests: one engine or a pool. Its methods may be called concurrently, but only from one event loop."""

    name: str

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the deltas of a request. The last delta has `finish` set. Closing the iterator early aborts it."""

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests now (all requests if None). Each yields a last delta with `finish = "aborted"`."""

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Return `n` requests that continue a running request after its first `at` tokens (prompt included).

        The caller passes the new requests to `generate`, where they share the running request's keys and values. The
        running request itself continues. Raises a `HeadraceError` of one line if the request is not running, or has
        fewer than `at` tokens.
        """

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Return untempered log-probabilities of tokens 1..n given their prefix, under the live weights ([n - 1])."""

    async def close(self) -> None:
        """End all running requests and free all resources. Idempotent."""


class Engine(Sampler, Protocol):
    """One served model that takes new weights. An engine samples nothing until it has proved a version."""

    async def load(self, manifest: Manifest) -> Proof:
        """Stage and check these weights, swap them in between two steps, and prove the live weights.

        Weights that are rejected before the swap change nothing. If the live weights turn out wrong, the engine is in
        quarantine until a later version is proved. An engine without a second copy of its weights may lose the old
        weights when it rejects new ones. The proof then says `quarantined`: all requests have ended with their partial
        completions, and the engine samples nothing until a version is proved.
        """


class Counters(msgspec.Struct, kw_only=True):
    """The counters and the occupancy of an engine, at some moment near the call. Only benchmarks and tests use them."""

    version: int
    """The version that the engine's weights are proved to be; -1 before the first proof and in quarantine."""
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    free_blocks: int
    """The number of blocks of the KV cache that no running sequence holds."""
    total_blocks: int
    preemptions: int = 0
    """How often a sequence lost its blocks to others and was computed again. Only the embedded engine counts this."""


def token_delta(
    request_id: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    finish: FinishReason | None = None,
    error: str = "",
    kept: Kept | None = None,
    routing: Int16Array | None = None,
) -> Delta:
    """Make a delta whose tokens all have the same version."""
    return Delta(
        id=request_id,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([float(logprob) for logprob in logprobs], np.float32),
        versions=np.full(len(token_ids), version, np.int32),
        finish=finish,
        error=error,
        kept=kept,
        routing=routing,
    )


def failed_delta(request_id: str, reason: str) -> Delta:
    """Make the last delta of a request that ends with an error. The delta has no tokens."""
    return token_delta(request_id, [], [], NO_VERSION, "failed", reason)


@asynccontextmanager
async def closing_deltas(deltas: AsyncIterator[Delta]) -> AsyncIterator[AsyncIterator[Delta]]:
    """Close the iterator when the block ends. This frees the request when its reader stops early."""
    try:
        yield deltas
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()
