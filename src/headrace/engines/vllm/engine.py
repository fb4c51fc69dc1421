"""An engine on a vLLM server: it decides which requests run there and which wait, and swaps weights between them.

    generate ─▶ waiting ──(gate open, a slot free)──▶ running: one stream each ─▶ deltas
                   ▲                                     │
                   └──── recall: continue later ◀────────┘

Weights change only while none of our requests runs. Before a swap, every stream is ended and its request is put back.
The request is resumed from its prefix under the new version. So a stream has exactly one version: it is known when the
stream opens, and the server confirms it when the stream ends. The server's prefix cache is keyed by that version.

Requests are sent again while the weights load, so that the server begins with them at once. Tokens that arrive before
the proof are held back. If the proof fails, they are dropped, and the gate is closed until a later version is proved.

Sampling settings are translated completely, or refused in one line. vLLM stops only at the stop tokens that the request
lists. Stop sequences are found here, token by token, because vLLM knows them only as text. If several truncation rules
are combined, our plugin applies them, because vLLM applies them in another order.
"""

from __future__ import annotations

import asyncio
import heapq
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import (
    Counters,
    Delta,
    FinishReason,
    Interrupt,
    Request,
    token_delta,
)
from headrace.engines.requests import first_stop
from headrace.engines.streams import StreamedEngine
from headrace.engines.vllm.client import AnswerPiece, Delivery, VllmClient
from headrace.engines.vllm.sampling import joined, kept_sets, refusal, sampling_params, wrong_version
from headrace.errors import ChannelError, DeadlineError, HttpError, UserError, one_line
from headrace.observe.spans import SpanRecorder
from headrace.types import NO_VERSION, Float32Array, Int32Array
from headrace_vllm_plugin.wire import Facts

GRACE_SECONDS = 0.5
"""How long a server may take to end a stream. After that the stream is closed from our side, and tokens that were not
handed out are drawn again."""
SETTLE_SECONDS = 0.05
"""The same once new weights are loaded, while the server waits to decode again."""
EARLY_STREAMS = 2
"""The number of requests that are sent while weights load. More of them would keep the server's event loop and its
first step busy just when it should answer the canary."""
RETRIES = 4
"""A request fails if more than this many streams break in a row without a token between them."""
BACKOFF_SECONDS = 0.1

_FINISHES: dict[str, FinishReason] = {"length": "length", "stop": "stop"}

Cut = Literal["", "recall", "abort"]
"""Why a stream is ended from our side. `recall`: the request continues later. `abort`: the request ends."""


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
        kept = kept_sets(self.request.sampling, len(tokens), piece.kept) if self.request.sampling.record_kept else None
        routing = None if piece.experts is None else piece.experts[: len(tokens)]
        return token_delta(self.request.id, tokens, piece.logprobs[:end], version, finish, kept=kept, routing=routing)


class VllmEngine(StreamedEngine):
    """An `Engine` on a vLLM server. It is made inside a running event loop, and used from that event loop only."""

    def __init__(
        self,
        client: VllmClient,
        facts: Facts,
        *,
        name: str,
        slots: int,
        max_length: int,
        interrupt: Interrupt = "never",
        deadline: float = 120.0,
        keys: str = "",
        spans: SpanRecorder | None = None,
        scaling: float | None = None,
        record_experts: bool = False,
    ) -> None:
        """Drive the server behind `client`, whose facts `examine` has found. The engine closes the client.

        With `record_experts`, tokens are handed out when a stream ends, if the server records experts: it sends the
        experts of all tokens with the last message.
        """
        super().__init__(name)
        self._client = client
        self._facts = facts
        self._expert_layers = facts.expert_layers if record_experts else []
        self._slots = min(slots, facts.slots)
        self._max_length = max_length
        self._interrupt = interrupt
        self._deadline = deadline
        self._delivery = Delivery(client, name, deadline=deadline, keys=keys, scaling=scaling)
        self._spans = spans or SpanRecorder()
        self._decoding: ExitStack | None = None
        self._salt = secrets.token_hex(16)
        self._unproved = NO_VERSION
        """The version that is loaded now and not proved yet, once requests may be sent."""
        self._held: dict[VllmSequence, list[Delta]] = {}
        """The deltas that were drawn under the unproved version."""
        self._waiting: list[VllmSequence] = []
        self._running: dict[str, VllmSequence] = {}
        self._orders = 0
        self._attempts = 0
        """The number of streams that were opened."""
        self._admitted: int | None = None
        """Set while a swap is due: requests with a higher order number than this do not start."""
        self._allowance: int | None = None
        """The number of streams that may still open before the loaded version is proved; None without a limit."""
        self._recalled: set[VllmSequence] = set()
        """The requests that the last pause ends, and nothing else."""
        self._ended = asyncio.Event()
        """Set when the last pause has ended a request."""
        self._pausing: asyncio.Task[None] | None = None
        """The call that pauses the server, until its answer was taken."""
        self._loading = asyncio.Lock()
        self._closed = ""
        self._changed = asyncio.Event()
        self._generated = 0
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        """The version that the live weights are proved to be."""
        return self._delivery.version

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`. Unknown ids are ignored."""
        self.flush()
        chosen = None if ids is None else set(ids)
        leaving = [one for one in self._waiting if chosen is None or one.request.id in chosen]
        for sequence in leaving:
            self._finish(sequence, "aborted")
        self._waiting = [one for one in self._waiting if one not in leaving]
        heapq.heapify(self._waiting)
        running = [one for one in self._running.values() if chosen is None or one.request.id in chosen]
        for sequence in running:
            sequence.cut = "abort"
        self._recalled.difference_update(running)
        if running:
            grace = GRACE_SECONDS
            try:
                await self._client.abort([one.server_id for one in running])
            except ChannelError:
                grace = 0.0  # Closing their connections also ends these requests.
            await self._end([one.task for one in running if one.task is not None], grace)

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Raise `UserError`, because vLLM cannot fork a request."""
        raise UserError(
            "vLLM cannot fork a running request: ask for a new one with its tokens as the prompt, which the server's"
            " prefix cache shares"
        )

    async def load(self, manifest: Manifest) -> Proof:
        """Stage the weights while requests run, clear the server as `interrupt` says, swap and prove.

        Weights that are rejected before the swap change nothing.
        """
        async with self._loading:
            try:
                if reason := await self._delivery.stage(manifest) or await self._make_way():
                    return Proof(engine=self.name, version=manifest.version, accepted=False, reason=reason)
                with self._spans.span("swap"):
                    return await self._swap(manifest)
            finally:
                self._admitted = None
                self._pump()

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return await self._client.score(token_ids.tolist())

    def counters(self) -> Counters:
        """Return this engine's own counters. Used blocks are those of running sequences, counted without sharing."""
        size = self._facts.block_size
        used = sum(-(-one.length // size) for one in self._running.values())
        return Counters(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            generated_tokens=self._generated,
            prefilled_tokens=self._client.prefilled_tokens,
            free_blocks=max(0, self._facts.blocks - used),
            total_blocks=self._facts.blocks,
        )

    async def close(self) -> None:
        """See `Engine.close`. Requests end as failed, and the client is closed."""
        if self._closed:
            return
        self._closed = reason = f"engine {self.name} was closed"
        streams = self._streams()
        for sequence in self._waiting:
            self._finish(sequence, "failed", reason)
        self._waiting = []
        try:
            await self._end(streams, 0.0)
        finally:
            await self._client.close()
        self.lost(reason)
        await asyncio.gather(*self._aborts)

    def _submit(self, requests: list[Request]) -> None:
        """Queue these requests. A request that cannot be served fails, and the others are not affected."""
        for request in requests:
            sequence = VllmSequence(request, self._orders)
            self._orders += 1
            if self._closed:
                self._finish(sequence, "failed", self._closed)
            elif reason := refusal(request, self._facts, self._max_length):
                self._finish(sequence, "failed", reason)
            else:
                heapq.heappush(self._waiting, sequence)
        self._pump()

    def _withdraw(self, request_id: str) -> None:
        task = asyncio.create_task(self.abort([request_id]), name=f"{self.name} abort")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        task.add_done_callback(self._task_ended)

    def _pump(self) -> None:
        while self._waiting and len(self._running) < self._slots and self._may_run(self._waiting[0]):
            if self._allowance is not None:
                self._allowance -= 1
            sequence = heapq.heappop(self._waiting)
            sequence.cut = ""
            self._attempts += 1
            sequence.server_id = f"{self._salt}-{self._attempts}"
            self._running[sequence.request.id] = sequence
            sequence.task = asyncio.create_task(self._run(sequence), name=f"{self.name} {sequence.request.id}")
            sequence.task.add_done_callback(self._task_ended)
        self._mark_busy()
        self._changed.set()
        self._changed.clear()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Fail all requests if a task ended with an error that nothing here expects: its request would hang."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lost(one_line(f"{self.name} failed: {type(error).__name__}: {error}"))

    def _mark_busy(self) -> None:
        """Record a span `decode` for the time in which any of our requests runs."""
        if self._running and self._decoding is None:
            self._decoding = ExitStack()
            self._decoding.enter_context(self._spans.span("decode"))
        elif not self._running and self._decoding is not None:
            self._decoding.close()
            self._decoding = None

    def _may_run(self, sequence: VllmSequence) -> bool:
        admitted = self._allowance != 0 and (self._admitted is None or sequence.order <= self._admitted)
        return admitted and not self._closed and self._serving != NO_VERSION

    @property
    def _serving(self) -> int:
        """The version of streams that open now."""
        return self.version if self._unproved == NO_VERSION else self._unproved

    async def _run(self, sequence: VllmSequence) -> None:
        """Run one stream until it ends, is cut by us, or breaks."""
        try:
            await self._stream(sequence)
        except asyncio.CancelledError:
            # Swallow only our own cancellation: `_end` cancels streams that were cut or closed.
            if not sequence.cut and not self._closed:
                raise
        except ChannelError as error:
            sequence.failures += 1
            retry = sequence.failures <= RETRIES and not (isinstance(error, HttpError) and error.status < 500)
            if not (sequence.finished or sequence.cut or retry):
                self._finish(sequence, "failed", f"request {sequence.request.id}: {error}")
        finally:
            del self._running[sequence.request.id]
        if not sequence.finished and self._closed:
            self._finish(sequence, "failed", self._closed)
        elif not sequence.finished and sequence.cut == "abort":
            self._finish(sequence, "aborted")
        elif not sequence.finished:
            heapq.heappush(self._waiting, sequence)
        self._pump()

    async def _stream(self, sequence: VllmSequence) -> None:
        if sequence.failures:
            await asyncio.sleep(BACKOFF_SECONDS * 2**sequence.failures)
        version = self._serving
        room = sequence.room(self._max_length)
        assert room > 0, "an answer that is long enough has ended"
        params = sampling_params(sequence.request.sampling, room, self._facts)
        tokens = [*sequence.request.token_ids.tolist(), *sequence.sampled]
        if self._expert_layers:
            # The experts that produce a token are those of the pass over the token before it.
            params["routed_experts_prompt_start"] = len(tokens) - 1
        stream = self._client.generate(sequence.server_id, tokens, params, salt=f"{self._salt}-{version}")
        pieces = self._with_experts(sequence, stream) if self._expert_layers else stream
        try:
            async for piece in pieces:
                if piece.finish == "abort" and sequence in self._recalled:
                    self._ended.set()
                if wrong := wrong_version(piece, version):
                    self._finish(sequence, "failed", f"request {sequence.request.id}: {wrong}")
                    return
                delta = sequence.take(piece, version)
                if delta is not None:
                    self._hand_out(sequence, delta, version)
                # The server does not know this stop, so the stream is closed here. Otherwise its last piece, which
                # confirms the version, is still to come.
                if sequence.finished and piece.finish is None:
                    return
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def _with_experts(
        self, sequence: VllmSequence, stream: AsyncIterator[AnswerPiece]
    ) -> AsyncIterator[AnswerPiece]:
        """Yield one piece with all tokens of a stream and their experts, once the stream has ended."""
        pieces: list[AnswerPiece] = []
        tokens: list[int] = []
        stopped = False
        async for piece in stream:
            pieces.append(piece)
            tokens += piece.token_ids
            sampling = sequence.request.sampling
            if piece.finish is not None:
                yield joined(pieces, self._expert_layers)
            elif not stopped and first_stop(tokens, sampling, sequence.sampled, len(sequence.sampled)) is not None:
                # The server does not know this stop. Without its last message the experts would be missing.
                stopped = True
                await self._client.abort([sequence.server_id])

    def _hand_out(self, sequence: VllmSequence, delta: Delta, version: int) -> None:
        self._generated += len(delta.token_ids)
        if version == self._unproved:
            self._held.setdefault(sequence, []).append(delta)
        else:
            self.deliver([delta])

    def _drop_held(self, sequence: VllmSequence) -> None:
        """Put a request back to its last token of a proved version."""
        count = sum(len(delta.token_ids) for delta in self._held.pop(sequence, []))
        del sequence.sampled[len(sequence.sampled) - count :]
        self._generated -= count

    async def _swap(self, manifest: Manifest) -> Proof:
        """Load and prove a version, and let requests begin meanwhile. What they draw before the proof is held back."""
        # The last messages of recalled streams may still be on their way. A request begins again when it is there.
        recalled = self._streams()

        def begin() -> None:
            self._unproved, self._admitted, self._allowance = manifest.version, None, EARLY_STREAMS
            self._pump()

        async def settle() -> None:
            # A request that the server received during the pause was not ended by it. It would be drawn under the new
            # weights, and the server says so only at its end. Its connection is closed before the scheduler resumes.
            await self._end(recalled, SETTLE_SECONDS)
            await self._paused()

        proof = None
        try:
            proof = await self._delivery.swap(manifest, begin, settle)
        finally:
            if proof is None or not proof.accepted:
                await self._take_back()
            self._unproved, self._allowance = NO_VERSION, None
            held, self._held = self._held, {}
            for deltas in held.values():
                self.deliver(deltas)
        return proof

    async def _take_back(self) -> None:
        """End all streams of weights that are not proved, and drop what they have drawn."""
        self._admitted = -1
        # The prefix cache holds keys and values of these weights, and the same version may come again.
        self._salt = secrets.token_hex(16)
        streams = self._streams()
        try:
            await self._recall("recall")
            await self._paused()
            await self._client.resume()
        except ChannelError:
            pass  # The server is lost, and so are its streams.
        await self._end(streams, GRACE_SECONDS)
        for sequence in list(self._held):
            self._drop_held(sequence)
            if sequence.finished and sequence.request.id in self._open:
                sequence.finished = False
                heapq.heappush(self._waiting, sequence)

    async def _make_way(self) -> str:
        """Pause the server's scheduler when none of our requests runs there. Return why that failed, if it did."""
        try:
            async with asyncio.timeout(self._deadline):
                if self._interrupt == "block":
                    self._admitted = self._orders - 1
                    while any(one.order <= self._admitted for one in [*self._running.values(), *self._waiting]):
                        await self._changed.wait()
                self._admitted = -1
                if self._interrupt in ("drain", "block"):
                    while self._running:
                        await self._changed.wait()
                    await self._client.pause("wait")
                else:
                    await self._recall("abort" if self._interrupt == "abort" else "recall")
        except TimeoutError:
            return f"{len(self._running)} running requests did not end in {self._deadline:g} s"
        except ChannelError as error:
            return str(error)
        return ""

    async def _recall(self, cut: Cut) -> None:
        """Pause the server's scheduler and end every request there. The streams end when their last messages come.

        The first of these messages shows that the scheduler is paused, so nothing more is waited for here.
        """
        await self._paused()
        running, streams = list(self._running.values()), self._streams()
        self._recalled = {sequence for sequence in running if not sequence.cut}
        for sequence in running:
            sequence.cut = sequence.cut or cut
        self._ended.clear()
        self._pausing = asyncio.create_task(self._client.pause("abort"), name=f"{self.name} pause")
        self._pausing.add_done_callback(lambda task: task.cancelled() or task.exception())  # `_paused` raises it.
        ended = asyncio.create_task(self._ended.wait(), name=f"{self.name} recall")
        try:
            await asyncio.wait({self._pausing, ended}, return_when=asyncio.FIRST_COMPLETED)
            if self._pausing.done():
                await self._pausing
        except (ChannelError, asyncio.CancelledError):
            self._pausing.cancel()
            await self._end(streams, 0.0)
            raise
        finally:
            ended.cancel()

    async def _paused(self) -> None:
        """Wait for the server's answer to the pause, which comes some time after the pause has begun."""
        pausing, self._pausing = self._pausing, None
        if pausing is not None:
            await pausing

    def _streams(self) -> list[asyncio.Task[None]]:
        """Return the streams that are open now. A sequence that is recalled may open another one."""
        return [sequence.task for sequence in self._running.values() if sequence.task is not None]

    async def _end(self, streams: Sequence[asyncio.Task[None]], grace: float) -> None:
        """Wait until these streams have ended. After `grace` seconds, close the connections of the others."""
        tasks = [task for task in streams if not task.done()]
        if not tasks:
            return
        _, open_tasks = await asyncio.wait(tasks, timeout=grace)
        for task in open_tasks:
            task.cancel()
        if open_tasks:
            _, open_tasks = await asyncio.wait(open_tasks, timeout=self._deadline)
        if open_tasks:
            raise DeadlineError(f"{len(open_tasks)} streams of {self.name} did not close in {self._deadline:g} s")

    def _finish(self, sequence: VllmSequence, finish: FinishReason, error: str = "") -> None:
        self._drop_held(sequence)
        sequence.finished = True
        self.deliver([token_delta(sequence.request.id, [], [], NO_VERSION, finish, error)])
