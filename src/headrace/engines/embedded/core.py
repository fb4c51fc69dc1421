"""The embedded engine without threads: submit, step, swap.

A pass sees one version of the weights and tags its tokens with that version. Everything runs in one thread, except
`stage`, which does not touch the live weights. After a swap, steps continue at once under the new weights while the
proof is being made. Tokens of the new version leave the engine only after the proof. Without a second copy of the
weights (`[engine] staging = "none"`), no step is made until the new weights are proved.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import BaseDigest, Installed, Receiver, Staged
from headrace.engines.base import Counters, Delta, Request
from headrace.engines.embedded.base import Haste
from headrace.engines.embedded.likeliest import refusal, unpacked
from headrace.engines.embedded.scheduler import Scheduler
from headrace.engines.embedded.sequence import Ending, Sampled, Sequence, ending
from headrace.engines.embedded.setup import MakeRunner, make_runner
from headrace.engines.embedded.staging import choose_staging
from headrace.engines.embedded.transfer import Arriving
from headrace.engines.requests import fork_requests, request_refusal
from headrace.errors import DeliveryError, UserError
from headrace.models.fp8 import Fp8Arrivals, fp8_arrivals, quantize_linears
from headrace.models.loading import named_weights
from headrace.models.lora import Adapter
from headrace.observe.spans import SpanRecorder
from headrace.types import NO_VERSION, Float32Array, Int32Array, TeacherScores, held_back_seconds

PHASES = 8
"""Sequences that began together are sent at this many different moments, spread over the time that tokens are held
back."""


class EngineCore:
    """Continuous batching over one model. With `version = -1`, requests wait until the first weights are proved."""

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        name: str,
        max_length: int,
        version: int = NO_VERSION,
        adapter: Adapter | None = None,
        base_digest: BaseDigest | None = None,
        spans: SpanRecorder | None = None,
        keys: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_runner: MakeRunner = make_runner,
    ) -> None:
        self.name = name
        self.max_length = max_length
        self.spans = spans
        self._clock = clock
        self._keep_kv = config.kv == "keep"
        self._swaps_soon = config.interrupt in ("never", "abort")
        """Whether staged weights are installed at once, and wait only for the work in flight."""
        if config.quantize == "fp8":
            quantize_linears(model)
        weights, conversion = _swapped(model, adapter)
        arriving = conversion.arriving if conversion is not None else None
        self.staging = choose_staging(model, config, max_length, weights, arriving)
        """Where new weights are staged, and why."""
        self._one_copy = self.staging.staging == "none"
        self._runner, self._pool = make_runner(model, config, max_length, self.staging.device_bytes)
        # Again, because a runner may lay parameters out anew, at other addresses.
        weights, conversion = _swapped(model, adapter)
        self.scheduler = Scheduler(
            self._pool,
            slots=config.slots,
            prefill_chunk=config.prefill_chunk or self._runner.prefill_chunk,
            gather=self._runner.gather,
        )
        self._receiver = Receiver(
            weights,
            name,
            keys=keys,
            installed=adapter.apply if adapter is not None else None,
            base_digest=base_digest,
            staging=self.staging.staging,
            conversion=conversion,
        )
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.timings = self._runner.timings
        self.sequences: dict[str, Sequence] = {}
        """The requests that were accepted and have not ended, by their ids."""
        self._ready: list[Delta] = []
        """Deltas that the next step returns in any case."""
        self._unproved: Installed | None = None
        """Weights that are live but not proved yet."""
        self._canary: Arriving | None = None
        """The scores of their canary, once requested. Where steps are launched ahead, the canary is scored after the
        first step under the new weights, so that the token of that step is not delayed."""
        self._proof: Proof | None = None
        self._submitted = 0
        self._generated = 0
        self._prefilled = 0
        self.version = NO_VERSION
        """The version that the live weights are proved to be; -1 before the first proof and in quarantine."""
        self.drawn_version = NO_VERSION
        """The newest version under which a token was drawn, as far as the host knows."""
        self.drawn_at = 0.0
        """The time at which the host first saw a token of `drawn_version`."""
        self._live = NO_VERSION
        if version != NO_VERSION:
            self.adopt(version)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        if self._ready or self._runner.busy:
            return True
        # A sequence that has ended only waits for the proof.
        return self._live != NO_VERSION and any(s.ending is None for s in self.sequences.values())

    def adopt(self, version: int) -> None:
        """Serve the weights that the model holds now as this version, without a proof.

        Use it for weights that were not delivered: the weights that were loaded with the model, or written by the
        caller.
        """
        self._go_live(version)
        self.version = version

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. One that cannot be served fails in the next step. Raises `ValueError` if an id is in use."""
        for request in requests:
            if request.id in self.sequences:
                raise ValueError(f"request {request.id} is already being served")
            sequence = Sequence(request, self._submitted)
            sequence.limit = min(sequence.limit, self.max_length)
            self._submitted += 1
            if reason := request_refusal(request, self._vocabulary, self.max_length):
                self._ready.append(sequence.delta("failed", reason))
            else:
                self.sequences[request.id] = sequence
                self.scheduler.add(sequence)

    def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`. The new requests share keys and values if they are submitted while the parent runs."""
        self._ready += self._settle()
        sequence = self.sequences.get(request_id)
        if sequence is None:
            raise UserError(f"fork of request {request_id}: it is not running")
        return fork_requests(sequence.request, sequence.tokens, at, n)

    def abort(self, ids: Iterable[str] | None = None) -> list[Delta]:
        """End these requests (all requests if None), each with its partial completion. Unknown ids are ignored."""
        chosen = list(self.sequences) if ids is None else [i for i in ids if i in self.sequences]
        if not chosen:
            return []
        deltas = self._settle()
        remaining = (self.sequences[i] for i in dict.fromkeys(chosen) if i in self.sequences)
        return deltas + [self._finish(sequence, Ending("aborted")) for sequence in list(remaining)]

    def abandon(self) -> list[Delta]:
        """End everything without using the device, which may not answer. Return all known tokens that are proved."""
        unproved, self._unproved = self._unproved, None
        deltas, self._ready = self._ready, []
        for sequence in list(self.sequences.values()):
            sequence.in_flight = 0
            if unproved is not None and (wrong := sequence.sampled_under(unproved.staged.manifest.version)):
                self.scheduler.truncate(sequence, sequence.sampled - wrong)
            self.scheduler.remove(sequence)
            deltas.append(sequence.delta("aborted"))
        self.sequences.clear()
        return deltas

    def abort_started(self) -> list[Delta]:
        """End the requests that are running or have sampled tokens. Requests that never began keep waiting."""
        started = self._started()
        return self.abort(i for i in list(self.sequences) if i in started)

    def hold(self, *, submitted: bool) -> None:
        """Let no new requests begin until `let_go`. Requests that have begun continue.

        With `submitted`, requests that were submitted before this call may still begin.
        """
        self.scheduler.held = self._submitted if submitted else 0

    def let_go(self) -> None:
        """Let requests begin again."""
        self.scheduler.held = None

    def at_rest(self) -> bool:
        """Return whether the requests that `hold` did not hold have ended. It is always True without live weights."""
        if self._live == NO_VERSION:
            return True
        held = self.scheduler.held
        return not (any(s.rank[1] < held for s in self.sequences.values()) if held else self._started())

    def flush(self) -> list[Delta]:
        """Wait for everything in flight, and return every token that was not handed out yet."""
        self._ready += self._settle()
        deltas, self._ready = self._ready, []
        return deltas + [s.delta() for s in self.sequences.values() if s.unsent]

    def step(self) -> list[Delta]:
        """Begin one plan. Return last deltas of sequences that ended, and tokens that were held back long enough."""
        deltas, self._ready = self._ready, []
        with self._runner.active():
            if self._live == NO_VERSION or not self.sequences:
                return deltas + self._take(self._runner.drain())
            if self._runner.holds:
                return deltas + self._take(self._runner.collect()) + self._flush_due()
            ahead = self._runner.ahead
            if self.scheduler.shortage(ahead):
                deltas += self._take(self._runner.drain())
                ahead = 1
            plan = self.scheduler.plan(self._live, ahead)
            for sequence in plan.refused:
                if self._unproved is not None:
                    # Its tokens may not leave before the proof. It is queued, and refused again later.
                    self.scheduler.add(sequence)
                    continue
                del self.sequences[sequence.id]
                reason = (
                    f"request {sequence.id}: {len(sequence.tokens)} tokens do not fit into the KV cache of"
                    f" {self._pool.total * self._pool.block_size} (raise [engine] cache_tokens)"
                )
                deltas.append(sequence.delta("failed", reason))
            for sequence in plan.preempted:
                self._runner.release(sequence)
            if plan.chunks or self._runner.busy:
                with self._span("decode" if all(c.count == 1 for c in plan.chunks) else "prefill"):
                    sampled = self._runner.run(plan, self._live)
                self.scheduler.advance(plan, self._live)
                self._prefilled += sum(c.count for c in plan.chunks if not c.decodes)
                deltas += self._take(sampled)
            if self._unproved is not None and (self.drawn_version >= self._live or not self._runner.busy):
                self._score_canary(self._unproved)
        return deltas + self._flush_due()

    def stage(self, manifest: Manifest) -> Staged:
        """Fetch and check weights beside the live ones, also in another thread. Raises `DeliveryError` on failure."""
        try:
            staged = self._receiver.stage(manifest, lambda: self._hurry("soon"))
        except DeliveryError:
            self._runner.hurry("none")
            raise
        self._hurry("now")
        return staged

    def install(self, staged: Staged) -> None:
        """Make staged weights live, between two steps. `proof` tells later whether they are right.

        Without a second copy of the weights they are proved here, before the next step. Raises `DeliveryError` if the
        weights are rejected. If `quarantined` is then true, the old weights are gone: every request has ended with its
        partial completion, and nothing is sampled until a version is proved.
        """
        self._runner.hurry("none")
        with self._span("swap"), self._runner.active():
            if self._one_copy or not self._keep_kv or self._unproved is not None:
                self._ready += self._settle()
            self._unproved = self._receiver.install(staged) if not self._one_copy else self._overwrite(staged)
            self._canary = None
            self._go_live(staged.manifest.version)
            if self._one_copy:
                self._ready += self._prove(self._unproved)
            elif not (self._runner.overlaps and self.sequences):
                self._score_canary(self._unproved)

    def proof(self, *, wait: bool) -> Proof | None:
        """Return the proof of the installed weights once, then None. Without `wait`, return None if it is not ready."""
        installed, canary = self._unproved, self._canary
        if installed is not None and (wait or (installed.ready() and canary is not None and canary.ready())):
            self._ready += self._prove(installed)
        proof, self._proof = self._proof, None
        return proof

    def swap(self, staged: Staged) -> Proof:
        """Install staged weights and wait for their proof."""
        self.install(staged)
        proof = self.proof(wait=True)
        assert proof is not None
        return proof

    @property
    def quarantined(self) -> bool:
        """Whether the live weights are not proved to be any version, after new weights were written over them."""
        return self._receiver.quarantined

    def score(self, token_ids: Int32Array) -> Float32Array:
        """Return the log-probabilities of tokens 1..n given their prefix, under the live weights ([n - 1]).

        Raises `UserError` in quarantine, because the live weights are then those of no version.
        """
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < self._vocabulary:
            raise UserError(f"a token id to score is outside of the vocabulary of {self._vocabulary}")
        with self._runner.active():
            if self._unproved is not None:
                self._ready += self._prove(self._unproved)
            if self.quarantined and self._live == NO_VERSION:
                raise UserError(f"{self.name} has no proved weights to score with")
            return self._runner.score(token_ids).result()

    def score_likeliest(
        self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int
    ) -> TeacherScores:
        """Return the scores of a sequence under the live weights, which are proved, and the k likeliest tokens.

        Raises `UserError` if there is no proved version or the sequence cannot be scored.
        """
        with self._runner.active():
            if self._unproved is not None:
                self._ready += self._prove(self._unproved)
            if why := refusal(token_ids, k, vocabulary, self._vocabulary, self.max_length, self.version):
                raise UserError(why)
            numbers = self._runner.score_likeliest(token_ids, temperatures, k, vocabulary).result()
            return unpacked(numbers, self.version)

    def counters(self) -> Counters:
        """Return the counters and occupancy, at some moment near the call. Any thread may call this."""
        return Counters(
            version=self.version,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            preemptions=self.scheduler.preemptions,
            free_blocks=self._pool.free,
            total_blocks=self._pool.total,
        )

    def close(self) -> None:
        """Free what the receiver of weights holds. Idempotent."""
        self._receiver.close()

    def _hurry(self, haste: Haste) -> None:
        if self._swaps_soon:
            self._runner.hurry(haste)

    def _started(self) -> set[str]:
        return {s.id for s in self.scheduler.running} | {s.id for s in self.sequences.values() if s.sampled}

    def _settle(self) -> list[Delta]:
        """Wait for the proof and for all tokens in flight, and record the tokens."""
        with self._runner.active():
            deltas = self._prove(self._unproved) if self._unproved is not None else []
            return deltas + self._take(self._runner.drain())

    def _overwrite(self, staged: Staged) -> Installed:
        """Install weights for which there is no second copy. The engine has no version meanwhile."""
        held, self.version = self.version, NO_VERSION
        try:
            return self._receiver.install(staged)
        except DeliveryError:
            if self.quarantined:
                self._lose_weights()
            else:
                self.version = held
            raise

    def _prove(self, installed: Installed) -> list[Delta]:
        with self._runner.active():
            self._proof = self._receiver.prove(installed, self._score_canary(installed).result())
            self._unproved = None
            if self._proof.accepted:
                self.version = self._proof.version
            else:
                self._withdraw(installed.staged.manifest.version)
                if self._one_copy:
                    self._lose_weights()
            return [self._finish(s, s.ending) for s in list(self.sequences.values()) if s.ending is not None]

    def _go_live(self, version: int) -> None:
        """Record that passes see this version from now on. The content of the KV cache belongs to an older version."""
        self._live = version
        with self._runner.active():
            self._runner.installed(version)
        if self._keep_kv:
            self.scheduler.forget_prefixes()
        else:
            self._recompute_all()

    def _recompute_all(self) -> None:
        for sequence in self.scheduler.running:
            self._runner.release(sequence)
        self.scheduler.recompute_all()

    def _score_canary(self, installed: Installed) -> Arriving:
        if self._canary is None:
            # Copied, because arrays from a channel are read-only and torch warns about read-only arrays.
            token_ids = installed.staged.manifest.canary.token_ids.copy()
            self._canary = self._runner.score(token_ids, again=True)
        return self._canary

    def _withdraw(self, version: int) -> None:
        """Undo everything that was drawn under this version, because the live weights are wrong."""
        self._take(self._runner.drain(), finish=False)
        self.version = self._live = NO_VERSION
        self._recompute_all()
        for sequence in self.sequences.values():
            if wrong := sequence.sampled_under(version):
                self._generated -= wrong
                self.scheduler.truncate(sequence, sequence.sampled - wrong)
            if sequence.ending is not None and sequence.ending.version == version:
                sequence.ending = None

    def _lose_weights(self) -> None:
        """Serve nothing until a version is proved. End all requests, so that other engines resume them."""
        self.version = self._live = NO_VERSION
        self._recompute_all()
        self._ready += [self._finish(sequence, Ending("aborted")) for sequence in list(self.sequences.values())]

    def _take(self, sampled: list[Sampled], *, finish: bool = True) -> list[Delta]:
        """Record new tokens. Return the last deltas of sequences that ended, unless these wait for a proof."""
        deltas = []
        now = self._clock()
        for new in sampled:
            sequence = new.sequence
            # The device may have continued a sequence that had ended by a rule which only the host knows.
            if sequence.ending is not None or self.sequences.get(sequence.id) is not sequence:
                continue
            sequence.ending = end = ending(new)
            if end is not None:
                new.cut(end.tokens)
            sequence.extend(new, now)
            self._generated += len(new.tokens)
            if new.versions and new.versions[-1] > self.drawn_version:
                self.drawn_version, self.drawn_at = int(new.versions[-1]), now
            if end is not None and finish and self._unproved is None:
                deltas.append(self._finish(sequence, end))
        return deltas

    def _finish(self, sequence: Sequence, end: Ending) -> Delta:
        blocks = list(sequence.blocks)
        del self.sequences[sequence.id]
        self._runner.release(sequence)
        self.scheduler.remove(sequence)
        if end.finish == "failed":
            # Let no other sequence find or read these blocks, because their content is wrong.
            self._pool.forget(blocks)
            self._runner.clear([block for block in blocks if not self._pool.references(block)])
        return sequence.delta(end.finish, end.error)

    def _flush_due(self) -> list[Delta]:
        if self._unproved is not None:
            return []
        now, patience = self._clock(), held_back_seconds(len(self.sequences))
        due = []
        for sequence in self.sequences.values():
            if not sequence.unsent:
                continue
            if sequence.flushed_at is None:
                # Sequences that began together are not always sent together, so that no turn of the host is long.
                sequence.flushed_at = now - patience * (sequence.rank[1] % PHASES) / PHASES
            elif now - sequence.flushed_at >= patience:
                sequence.flushed_at = now
            else:
                continue
            due.append(sequence.delta())
        return due

    def _span(self, name: str) -> AbstractContextManager[None]:
        return self.spans.span(name) if self.spans is not None else nullcontext()


def _swapped(model: Any, adapter: Adapter | None) -> tuple[dict[str, torch.Tensor], Fp8Arrivals | None]:
    """Return the tensors that a new version replaces, where they lie now, and how versions become FP8 weights."""
    weights = adapter.weights() if adapter is not None else named_weights(model)
    return weights, fp8_arrivals(model, weights)
