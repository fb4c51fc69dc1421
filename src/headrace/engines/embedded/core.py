"""The engine without threads: submit, step, swap. A pass sees one version of the weights, and tags its tokens with it.

Everything here runs in one thread, except `stage`, which touches no live weight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver, Staged
from headrace.engines.base import Delta, EngineStats, FinishReason, Request
from headrace.engines.embedded.kv_cache import BlockPool, KVCache
from headrace.engines.embedded.runner import ModelRunner
from headrace.engines.embedded.sampler import draw
from headrace.engines.embedded.scheduler import Plan, Scheduler
from headrace.engines.embedded.sequence import Sequence
from headrace.models.loading import named_weights
from headrace.observe.spans import SpanRecorder
from headrace.types import NO_VERSION, Float32Array, Int32Array

FLUSH_SECONDS = 0.2
"""Tokens of a running sequence are held back no longer than this (and one step)."""


class EngineCore:
    """Continuous batching over one model. With `version = -1` requests wait until the first weights are proved."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        name: str,
        max_length: int,
        version: int = NO_VERSION,
        spans: SpanRecorder | None = None,
        keys: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        blocks_per_sequence = -(-max_length // config.block_size)
        blocks = -(-config.cache_tokens // config.block_size) or config.slots * blocks_per_sequence
        self.name = name
        self.version = version
        """What the live weights are proved to be; -1 before the first proof and while quarantined."""
        self.max_length = max_length
        self.spans = spans
        self._clock = clock
        self._keep_kv = config.kv == "keep"
        self._pool = BlockPool(blocks, config.block_size)
        self._scheduler = Scheduler(self._pool, slots=config.slots, prefill_chunk=config.prefill_chunk)
        self._runner = ModelRunner(model, KVCache(blocks, config.block_size))
        self._receiver = Receiver(named_weights(model), name, keys=keys)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._sequences: dict[str, Sequence] = {}
        self._refused: list[Delta] = []
        self._submitted = 0
        self._generated = 0
        self._prefilled = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._refused) or (self.version != NO_VERSION and bool(self._sequences))

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. One that cannot be served ends as failed in the next step; an id in use is our error."""
        for request in requests:
            if request.id in self._sequences:
                raise ValueError(f"request {request.id} is already being served")
            sequence = Sequence(request, self._submitted)
            self._submitted += 1
            if refusal := self._refusal(request):
                self._refused.append(sequence.delta("failed", f"request {request.id}: {refusal}"))
            else:
                self._sequences[request.id] = sequence
                self._scheduler.add(sequence)

    def abort(self, ids: Iterable[str] | None = None) -> list[Delta]:
        """End these requests (all, if None), each with its partial completion. Unknown ids have already ended."""
        chosen = list(self._sequences) if ids is None else [i for i in ids if i in self._sequences]
        return [self._finish(self._sequences[i], "aborted") for i in dict.fromkeys(chosen)]

    def abort_started(self) -> list[Delta]:
        """End the requests that run or hold sampled tokens; those that never began keep waiting."""
        started = {s.id for s in self._scheduler.running} | {s.id for s in self._sequences.values() if s.sampled}
        return self.abort(i for i in list(self._sequences) if i in started)

    def flush(self) -> list[Delta]:
        """Every token that no delta holds yet."""
        return [s.delta() for s in self._sequences.values() if s.unsent]

    def step(self) -> list[Delta]:
        """One forward pass; the sequences that ended with it, and tokens that were held back long enough."""
        deltas, self._refused = self._refused, []
        if self.version == NO_VERSION or not self._sequences:
            return deltas
        plan = self._scheduler.plan(self.version)
        for sequence in plan.refused:
            del self._sequences[sequence.id]
            deltas.append(sequence.delta("failed", self._too_long(sequence)))
        if plan.chunks:
            with self._span("decode" if all(c.count == 1 for c in plan.chunks) else "prefill"):
                deltas += self._pass(plan)
        return deltas + self._flush_due()

    def stage(self, manifest: Manifest) -> Staged:
        """Fetch and check weights beside the live ones; raises `DeliveryError`. May run in another thread."""
        return self._receiver.stage(manifest)

    def swap(self, staged: Staged) -> Proof:
        """Copy staged weights over the live ones and prove them. Call between two steps."""
        with self._span("swap"):
            proof = self._receiver.swap(staged, self.score)
            if proof.accepted:
                self._installed(proof.version)
            elif proof.quarantined:
                self.version = NO_VERSION
        return proof

    def score(self, token_ids: Int32Array) -> Float32Array:
        """Log-probabilities of tokens 1..n given their prefix under the live weights ([n - 1])."""
        return self._runner.score(token_ids)

    def stats(self) -> EngineStats:
        """Counters and occupancy."""
        return EngineStats(
            version=self.version,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preemptions=self._scheduler.preemptions,
            free_blocks=self._pool.free,
            total_blocks=self._pool.total,
        )

    def close(self) -> None:
        """Let go of what deliveries hold. Idempotent."""
        self._receiver.close()

    def _installed(self, version: int) -> None:
        """The live weights are this version now: what the cache holds is of an older one."""
        self.version = version
        self._scheduler.forget_prefixes()
        if not self._keep_kv:
            self._scheduler.recompute_all()

    def _pass(self, plan: Plan) -> list[Delta]:
        sequences, logits = self._runner.run(plan)
        self._scheduler.advance(plan, self.version)
        self._prefilled += sum(c.count for c in plan.chunks if c.start < c.sequence.prompt_length or c.count > 1)
        if not sequences:
            return []
        tokens, logprobs = draw(logits, [s.sampling for s in sequences], [len(s.tokens) for s in sequences])
        self._generated += len(sequences)
        deltas = []
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            if not np.isfinite(logprob):
                deltas.append(self._fail_broken(sequence))
                continue
            sequence.append(token, logprob, self.version)
            if finish := self._ending(sequence, token):
                deltas.append(self._finish(sequence, finish))
        return deltas

    def _ending(self, sequence: Sequence, token: int) -> FinishReason | None:
        if token in sequence.sampling.stop_token_ids:
            return "stop"
        if sequence.sampled >= sequence.sampling.max_tokens or len(sequence.tokens) >= self.max_length:
            return "length"
        return None

    def _fail_broken(self, sequence: Sequence) -> Delta:
        """End a sequence whose logits are not finite, and leave nothing of it in the cache."""
        where = f"position {len(sequence.tokens)} under version {self.version}"
        blocks = list(sequence.blocks)
        delta = self._finish(sequence, "failed", f"request {sequence.id}: the logits are not finite at {where}")
        self._runner.clear([block for block in blocks if self._pool.is_free(block)])
        return delta

    def _finish(self, sequence: Sequence, finish: FinishReason, error: str = "") -> Delta:
        del self._sequences[sequence.id]
        self._scheduler.remove(sequence)
        return sequence.delta(finish, error)

    def _flush_due(self) -> list[Delta]:
        now = self._clock()
        due = []
        for sequence in self._sequences.values():
            if not sequence.unsent:
                continue
            if sequence.flushed_at is None:
                sequence.flushed_at = now
            elif now - sequence.flushed_at >= FLUSH_SECONDS:
                sequence.flushed_at = now
                due.append(sequence.delta())
        return due

    def _refusal(self, request: Request) -> str:
        """Why this request cannot be served, or nothing."""
        ids, sampling = request.token_ids, request.sampling
        if len(ids) == 0:
            return "its prompt has no tokens"
        if ids.min() < 0 or ids.max() >= self._vocabulary:
            return f"its prompt holds a token id outside of the vocabulary of {self._vocabulary}"
        if len(ids) >= self.max_length:
            return f"its prompt of {len(ids)} tokens leaves no room under the longest length of {self.max_length}"
        if sampling.max_tokens < 1 or sampling.temperature < 0 or sampling.top_k < 0 or not 0 < sampling.top_p <= 1:
            return "sampling needs max_tokens >= 1, temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
        return ""

    def _too_long(self, sequence: Sequence) -> str:
        held = self._pool.total * self._pool.block_size
        return (
            f"request {sequence.id}: {len(sequence.tokens)} tokens do not fit into the KV cache of {held}"
            " (raise [engine] cache_tokens)"
        )

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self.spans.span(name) if self.spans is not None else nullcontext()
