"""The engine protocol: prompts in, tokens out, with the version and log-probability of every token.

An engine never lets a forward pass see two versions of the weights, and never answers with tokens of a version that
it has not proved. `tests/contract/test_engine.py` holds what every implementation must keep.

A small engine, which `[engine] kind = "my_engine.py:MyEngine"` serves (`PlainEngine` takes the weights, and scores):

    import asyncio

    import torch
    from headrace.engines.base import token_delta
    from headrace.engines.plain import PlainEngine


    class MyEngine(PlainEngine):
        running: set[str] = set()

        async def generate(self, request):
            ids, sampling, finish = request.token_ids.tolist(), request.sampling, None
            last = len(ids) + sampling.max_tokens
            self.running.add(request.id)
            while finish is None and request.id in self.running:
                await asyncio.sleep(0.001)  # Others have their turn, and new weights.
                if self.version >= 0:
                    logprobs = self.logprobs(ids, sampling.temperature or 1e-3)[-1]
                    noise = torch.Generator().manual_seed(hash((sampling.seed, len(ids))))
                    ids.append(int(torch.multinomial(logprobs.exp(), 1, generator=noise)))
                    finish = "stop" if ids[-1] in sampling.stop_token_ids else "length" if len(ids) == last else None
                    yield token_delta(request.id, ids[-1:], [logprobs[ids[-1]]], self.version, finish)
            self.running.discard(request.id)
            if finish is None:
                yield token_delta(request.id, [], [], -1, "aborted")

        async def abort(self, ids=None):
            self.running -= self.running.copy() if ids is None else set(ids)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import msgspec
import numpy as np

from headrace.delivery.base import Manifest, Proof
from headrace.types import Float32Array, Int16Array, Int32Array, Kept

Interrupt = Literal["never", "abort", "drain", "block"]
"""What new weights do to requests: nothing, they go on under them; those that have begun end, to be resumed by prefix;
those that have begun end first, and no other begins; all that were asked for before end first."""

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""An end token; the length limit; `abort` (a partial completion is a normal answer); an error (see `Delta.error`)."""


KEPT_LIMIT = 1024
"""With `Sampling.record_kept` no more than this many of the best tokens are left to draw from."""


FORBIDDEN_LIMIT = 32
"""How many tokens a request may forbid."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw tokens. The noise of a token is a function of (seed, position) alone, never of its neighbours."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy; its log-probabilities are those of the untempered distribution."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are left out; 0 keeps all."""
    forbidden: tuple[int, ...] = ()
    """Tokens that are never drawn (at most `FORBIDDEN_LIMIT`); the others share their probability."""
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """A sampled token of these ends the sequence, and is part of it."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Sampled tokens that end with one of these end the sequence; they are part of it."""
    record_kept: bool = False
    """Answer with the tokens that truncation kept, for every sampled token (at most `KEPT_LIMIT`, the best)."""


def sampling_refusal(sampling: Sampling, vocabulary: int) -> str:
    """Why nothing can be drawn like this, or nothing."""
    positive = sampling.max_tokens >= 1 and sampling.temperature >= 0 and sampling.top_k >= 0
    if not (positive and 0 < sampling.top_p <= 1):
        return "sampling needs max_tokens >= 1, temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
    if not 0 <= sampling.min_p <= 1:
        return "sampling needs 0 <= min_p <= 1"
    if any(not stop for stop in sampling.stop_sequences):
        return "a stop sequence has no tokens"
    if len(sampling.forbidden) > FORBIDDEN_LIMIT or len(set(sampling.forbidden)) >= vocabulary:
        return f"more than {FORBIDDEN_LIMIT} tokens are forbidden, or all of them"
    return ""


class Request(msgspec.Struct, kw_only=True):
    """One sequence to continue. A partial completion is resumed by a request whose prompt holds its tokens."""

    id: str
    token_ids: Int32Array
    sampling: Sampling
    group: str = ""
    """Requests of one group that share a prompt compute it once."""
    priority: int = 0
    """Lower goes first; equal priorities in the order of submission."""
    parent: str = ""
    """A request that is running: what of its keys and values fits this prompt is shared, whatever their versions."""


class Delta(msgspec.Struct, kw_only=True):
    """The next tokens of a request. Deltas of a running request are at most a quarter of a second apart."""

    id: str
    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    finish: FinishReason | None = None
    """Set on the last delta of a request, which may hold no token."""
    error: str = ""
    kept: Kept | None = None
    """With `Sampling.record_kept`."""
    routing: Int16Array | None = None
    """[tokens, layers, k]: the experts chosen by the pass that each token was drawn from (mixtures of experts)."""


class Sampler(Protocol):
    """Whatever answers requests: one engine, or a pool of them. Methods may be called at once, from one event loop."""

    name: str

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """Yield the request's deltas; the last has `finish` set. Closing the iterator early aborts the request."""
        ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, if None) now; each yields a last delta with `finish = "aborted"`."""
        ...

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Return `n` requests that continue a running request from its first `at` tokens (prompt included).

        The caller passes them to `generate`, where they share the running request's keys and values. The running
        request goes on. Raises a `HeadraceError` of one line if the request is not running, or has no `at` tokens yet.
        """
        ...

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Log-probabilities of tokens 1..n given their prefix under the live weights, untempered ([n - 1])."""
        ...

    async def close(self) -> None:
        """End everything that runs and free what is held. Idempotent."""
        ...


class EngineProcess(Protocol):
    """An engine in a process of its own, told by the controller what comes from that process and how it fares."""

    def deliver(self, deltas: Sequence[Delta]) -> None:
        """Hand deltas to whoever waits for them; those of requests that were given up are dropped."""
        ...

    def lost(self, reason: str) -> None:
        """The process is gone: every open request ends as failed."""
        ...

    def back(self) -> None:
        """A new process has taken the place of the one that was lost."""
        ...


class Engine(Sampler, Protocol):
    """One model that is served, and takes new weights. An engine that has proved no version samples nothing."""

    async def load(self, manifest: Manifest) -> Proof:
        """Stage these weights, prove them, swap between two steps, prove them live. A rejected load changes nothing."""
        ...


def token_delta(
    request_id: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    version: int,
    finish: FinishReason | None = None,
) -> Delta:
    """A delta whose tokens are all of one version."""
    return Delta(
        id=request_id,
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([float(logprob) for logprob in logprobs], np.float32),
        versions=np.full(len(token_ids), version, np.int32),
        finish=finish,
    )


def failed_delta(request_id: str, reason: str) -> Delta:
    """The last delta of a request that ends in an error, without tokens."""
    return Delta(
        id=request_id,
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        versions=np.empty(0, np.int32),
        finish="failed",
        error=reason,
    )


@asynccontextmanager
async def closing_deltas(deltas: AsyncIterator[Delta]) -> AsyncIterator[AsyncIterator[Delta]]:
    """Close the iterator on the way out: that is what frees a request whose reader leaves early."""
    try:
        yield deltas
    finally:
        close = getattr(deltas, "aclose", None)
        if close is not None:
            await close()
