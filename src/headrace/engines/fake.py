"""A deterministic engine without a model and without torch, which keeps the protocol as strictly as a real engine.

Its tokens come from a `FakePolicy`. So each token is a pure function of (seed, position, version), whatever else runs.
Lengths, latencies and failures follow a script.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from headrace.delivery.base import Manifest, Proof, canary_error
from headrace.engines.base import Counters, Delta, FinishReason, Interrupt, Request, failed_delta, token_delta
from headrace.engines.fake_policy import FakeDraw, FakePolicy
from headrace.engines.requests import first_stop, fork_requests, sampling_refusal
from headrace.errors import DeliveryError, PeerDied, UserError
from headrace.types import NO_VERSION, Float32Array, Int32Array, Kept

Lengths = Callable[[Request], int] | Sequence[int]
"""The length of a completion in tokens, including the stop token: a function of the request, or a list that is used in
the order of submission and repeated."""


class FakeEngine:
    """An `Engine` without a model. Each step sleeps `token_seconds` and gives every running sequence one token.

    Without `lengths`, a completion ends when a stop token happens to be drawn, as with a real model. With `lengths`, a
    completion that may draw a stop token ends at exactly that length: no stop token is drawn earlier, and the last
    token is the first of its allowed stop tokens. A stop sequence can still end the completion earlier. A token that
    the script inserts has its untempered log-probability and counts as kept.
    """

    def __init__(
        self,
        *,
        name: str = "fake",
        policy: FakePolicy | None = None,
        version: int = NO_VERSION,
        slots: int = 64,
        lengths: Lengths | None = None,
        token_seconds: float = 0.0,
        load_seconds: float = 0.0,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        interrupt: Interrupt = "never",
        fail_requests: Mapping[str, int] | None = None,
        die_after: int | None = None,
        loads: Mapping[int, Literal["reject", "quarantine"]] | None = None,
    ) -> None:
        """Make an engine that has proved `version` (-1: it serves after the first `load`).

        `fail_requests` maps the id of a request to the number of tokens that it gives before it fails. `die_after` is
        the number of tokens after which the engine dies. `loads` maps a version to the way in which its load fails.
        """
        self.name = name
        self.policy = policy or FakePolicy()
        self.version = version
        self._slots = slots
        self._lengths = lengths
        self._token_seconds = token_seconds
        self._load_seconds = load_seconds
        self._sleep = sleep
        self._interrupt = interrupt
        self._fail_requests = dict(fail_requests or {})
        self._die_after = die_after
        self._loads = dict(loads or {})
        self.gate = asyncio.Event()
        """The engine makes no step while this event is clear. The event is set at the start."""
        self.gate.set()

        self._sequences: dict[str, _Sequence] = {}
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._submitted = 0
        self._ended = asyncio.Event()
        """Set whenever a sequence ends."""
        self._held: int | None = None
        """Set while new weights wait for requests to end: requests with this order number or higher do not begin."""
        self._rest: dict[tuple[int, int], int] = {}
        """The number of scripted tokens that an aborted sequence still had to give, by (seed, position)."""
        self._generated = 0
        self._prefilled = 0
        self._quarantined = False
        self._over: str | None = None
        """Why the engine no longer serves: it died, or it was closed."""
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        refusal = self._refusal(request)
        if refusal:
            yield failed_delta(request.id, refusal)
            return
        sequence = self._submit(request)
        finished = False
        try:
            while not finished:
                # The caller sets the deadline of this wait: an engine without proved weights gives no token.
                delta = await sequence.deltas.get()
                finished = delta.finish is not None
                yield delta
        finally:
            if not finished:
                self._end(sequence, "aborted")

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`. Unknown ids are ignored, because their requests may just have ended."""
        for id in list(self._sequences) if ids is None else ids:
            if id in self._sequences:
                self._end(self._sequences[id], "aborted")

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`."""
        self._check_alive()
        sequence = self._sequences.get(request_id)
        if sequence is None:
            raise UserError(f"fork of request {request_id}: it is not running")
        tokens = [*sequence.request.token_ids.tolist(), *sequence.tokens]
        return fork_requests(sequence.request, tokens, at, n)

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`. The swap is atomic: a step and a swap each run without yielding to the event loop."""
        self._check_alive()
        await self._sleep(self._load_seconds)
        await self._come_to_rest()
        self._check_alive()
        error = canary_error(manifest.canary, self.policy.score(manifest.canary.token_ids, manifest.version))
        reason = self._rejection(manifest)
        if not reason:
            if self._loads.get(manifest.version) == "quarantine":
                reason = "quarantined by script"
            elif manifest.canary.tolerance is not None and error > manifest.canary.tolerance:
                reason = f"the canary of version {manifest.version} is off by {error:g}"
            self._quarantined = bool(reason)
        if not reason:
            self.version = manifest.version
            if self._interrupt == "abort":
                await self.abort([sequence.id for sequence in self._running])
            self._wake()
        return Proof(
            engine=self.name,
            version=manifest.version,
            accepted=not reason,
            quarantined=self._quarantined,
            reason=reason,
            staged_digest=self.policy.manifest(manifest.version).digest,
            live_digest=self.policy.manifest(self.version).digest if self.version != NO_VERSION else 0,
            canary_error=error,
            stage_seconds=self._load_seconds,
        )

    async def _come_to_rest(self) -> None:
        """With `drain` and `block`, wait until the requests that new weights must not interrupt have ended."""
        if self._interrupt not in ("drain", "block"):
            return
        before = list(self._sequences.values())
        self._held = self._submitted if self._interrupt == "block" else 0
        # The caller sets the deadline of this wait too.
        while self._serving and any(
            self._sequences.get(s.id) is s and (self._interrupt == "block" or s in self._running or s.sampled)
            for s in before
        ):
            self._ended.clear()
            await self._ended.wait()
        self._held = None

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        self._check_alive()
        if not self._serving:
            raise DeliveryError(f"{self.name} has no proved weights to score with")
        return self.policy.score(token_ids, self.version)

    def counters(self) -> Counters:
        """Return the counters so far. A block stands for a slot."""
        return Counters(
            version=NO_VERSION if self._quarantined else self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            free_blocks=self._slots - len(self._running),
            total_blocks=self._slots,
        )

    async def close(self) -> None:
        """See `Engine.close`."""
        self.die("the engine was closed")
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])

    def die(self, reason: str) -> None:
        """Die now: every request fails for this reason, and so does whatever is asked later."""
        self._over = self._over or reason
        for sequence in list(self._sequences.values()):
            self._end(sequence, "failed", error=self._over)

    @property
    def _serving(self) -> bool:
        return self.version != NO_VERSION and not self._quarantined

    @property
    def _runnable(self) -> bool:
        return bool(self._sequences) and self._serving

    def _refusal(self, request: Request) -> str:
        if self._over is not None:
            return self._over
        if request.id in self._sequences:
            return f"a request with id {request.id!r} is already running"
        if not len(request.token_ids):
            return f"request {request.id!r} has no prompt token"
        if reason := sampling_refusal(request.sampling, self.policy.vocabulary):
            return f"request {request.id!r}: {reason}"
        outside = [id for id in request.sampling.stop_token_ids if id >= self.policy.vocabulary]
        if outside and self._lengths is not None:
            return f"stop token {outside[0]} is outside of the vocabulary of {self.policy.vocabulary}"
        return ""

    def _submit(self, request: Request) -> _Sequence:
        sequence = _Sequence(request, order=self._submitted, length=self._scripted_length(request))
        self._submitted += 1
        self._sequences[request.id] = sequence
        insort(self._waiting, sequence, key=lambda s: s.rank)
        self._wake()
        return sequence

    def _scripted_length(self, request: Request) -> int | None:
        if self._lengths is None or not _ends(request):
            return None
        rest = self._rest.pop((request.sampling.seed, len(request.token_ids)), None)
        if rest is not None:
            return rest
        if callable(self._lengths):
            return self._lengths(request)
        return self._lengths[self._submitted % len(self._lengths)]

    def _wake(self) -> None:
        if self._runnable and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive(), name=f"{self.name} steps")

    async def _drive(self) -> None:
        """Make steps while there is work. `_wake` starts this task again."""
        while self._runnable:
            await self._sleep(self._token_seconds)
            await self.gate.wait()
            if self._runnable:
                self._step()

    def _step(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            held = self._held if self._held is not None else self._submitted
            sequence = next((s for s in self._waiting if s.rank[1] < held), None)
            if sequence is None:
                break
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=lambda s: s.rank)
            self._prefilled += len(sequence.request.token_ids)
        for sequence in list(self._running):
            if self._die_after is not None and self._generated >= self._die_after:
                self.die(f"{self.name} died")
                return
            if self._fail_requests.get(sequence.id) == sequence.sampled:
                self._end(sequence, "failed", error=f"request {sequence.id!r} fails by script")
                continue
            self._advance(sequence)

    def _advance(self, sequence: _Sequence) -> None:
        """Give the sequence one token. If that token is the last, its delta carries the finish reason."""
        sampling = sequence.request.sampling
        drawn = self._draw(sequence)
        stops = first_stop([drawn.token], sampling, sequence.tokens, sequence.sampled) is not None
        sequence.tokens.append(drawn.token)
        self._generated += 1
        length: FinishReason | None = "length" if sequence.sampled == sampling.max_tokens else None
        finish: FinishReason | None = "stop" if stops else length
        sequence.deltas.put_nowait(_delta(sequence.request, [drawn], self.version, finish))
        if finish:
            self._forget(sequence)

    def _draw(self, sequence: _Sequence) -> FakeDraw:
        drawn = self.policy.draw(sequence.request.sampling, sequence.position, self.version)
        if sequence.length is None:
            return drawn
        token = self._scripted(sequence, drawn.token)
        if token == drawn.token:
            return drawn
        logprob = self.policy.logprob(token, sequence.position, self.version)
        kept = np.union1d(drawn.kept, np.int32(token)) if len(drawn.kept) else drawn.kept
        return FakeDraw(token, logprob, kept)

    def _scripted(self, sequence: _Sequence, drawn: int) -> int:
        """Return the token that follows the script.

        At the end of the script this is a stop token. Before, it is the drawn token or, instead of a stop token, the
        next token that does not stop.
        """
        sampling, size = sequence.request.sampling, self.policy.vocabulary
        assert sequence.length is not None
        if sequence.sampled + 1 >= sequence.length:
            return _ends(sequence.request)[0]
        if drawn not in sampling.stop_token_ids:
            return drawn
        avoided = {*sampling.stop_token_ids, *sampling.forbidden}
        return next((t % size for t in range(drawn, drawn + size) if t % size not in avoided), drawn)

    def _end(self, sequence: _Sequence, finish: FinishReason, error: str = "") -> None:
        if self._sequences.get(sequence.id) is not sequence:
            return
        if sequence.length is not None and finish == "aborted":
            self._rest[sequence.request.sampling.seed, sequence.position] = sequence.length - sequence.sampled
        sequence.deltas.put_nowait(_delta(sequence.request, [], NO_VERSION, finish, error))
        self._forget(sequence)

    def _forget(self, sequence: _Sequence) -> None:
        del self._sequences[sequence.id]
        self._ended.set()
        (self._running if sequence in self._running else self._waiting).remove(sequence)

    def _check_alive(self) -> None:
        if self._over is not None:
            raise PeerDied(self.name, self._over)

    def _rejection(self, manifest: Manifest) -> str:
        if self._loads.get(manifest.version) == "reject":
            return "rejected by script"
        if manifest.version <= self.version:
            return f"version {manifest.version} cannot follow version {self.version}"
        if manifest.digest != self.policy.manifest(manifest.version).digest:
            return f"the digest of version {manifest.version} is wrong"
        return ""


class _Sequence:
    """A request in the engine, with the tokens that were sampled for it."""

    def __init__(self, request: Request, order: int, length: int | None) -> None:
        self.request = request
        self.id = request.id
        self.rank = (request.priority, order)
        self.length = length
        self.tokens: list[int] = []
        """The sampled tokens, without the prompt."""
        self.deltas: asyncio.Queue[Delta] = asyncio.Queue()

    @property
    def sampled(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> int:
        return len(self.request.token_ids) + self.sampled


def _ends(request: Request) -> list[int]:
    return [token for token in request.sampling.stop_token_ids if token not in request.sampling.forbidden]


def _delta(
    request: Request, draws: list[FakeDraw], version: int, finish: FinishReason | None, error: str = ""
) -> Delta:
    delta = token_delta(request.id, [d.token for d in draws], [d.logprob for d in draws], version, finish, error)
    if request.sampling.record_kept:
        counts: Int32Array = np.array([len(d.kept) for d in draws], np.int32)
        delta.kept = Kept(counts=counts, token_ids=np.concatenate([np.empty(0, np.int32), *(d.kept for d in draws)]))
    return delta
