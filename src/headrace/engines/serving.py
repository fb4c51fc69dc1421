"""An engine in a worker process: the messages, the worker's end (`serve`) and the controller's end (`RemoteEngine`).

`EngineServer` is the protocol through which a worker process drives its engine, whatever kind of engine it is.
The engine runs in the main thread, and a second thread only passes messages. So a swap or an abort never waits for the
controller, and a slow controller never delays a decode step.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config import Config
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.engines.streams import StreamedEngine
from headrace.errors import HeadraceError, PeerDied
from headrace.types import Float32Array, Int32Array

T = TypeVar("T")


class Submit(Message):
    """Requests that enter the engine between the same two steps, in this order."""

    requests: list[Request]


class Deltas(Message):
    """New tokens of any number of requests."""

    deltas: list[Delta]


class Abort(Message):
    """End these requests, or all requests if `ids` is None."""

    ids: list[str] | None


class Fork(Message):
    """Make `n` requests that continue a running request after its first `at` tokens. The answer is `Forked`."""

    request_id: str
    at: int
    n: int


class Forked(Message):
    """The new requests, which the controller may submit."""

    requests: list[Request]


class Load(Message):
    """Fetch, swap in and prove these weights. The answer is `LoadProved`."""

    manifest: Manifest


class LoadProved(Message):
    """The outcome of a `Load`, accepted or rejected."""

    proof: Proof


class ScoreTokens(Message):
    """Score a sequence under the live weights. The answer is `TokensScored`."""

    token_ids: Int32Array


class TokensScored(Message):
    """The log-probabilities of tokens 1..n of a sequence."""

    logprobs: Float32Array


Emit = Callable[[list[Delta]], None]
"""Takes new deltas of any number of requests. It is called from the thread that calls `EngineServer.run`."""


class EngineServer(Protocol):
    """A server of one engine. It runs in the thread that calls `run`; other methods may be called from any thread.

    The other methods do not block. A future fails with the reason if the call cannot be carried out. If the engine
    depends on something outside of this process and that is lost, `run` raises `PeerDied`, and open requests and
    futures get no answer. The supervisor then restarts the process, and the requests are resumed on other engines.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. All requests of one call enter the engine together, in this order."""
        ...

    def abort(self, ids: Sequence[str] | None = None) -> object:
        """End these requests (all requests if None)."""
        ...

    def fork(self, request_id: str, at: int, n: int) -> Future[list[Request]]:
        """See `Engine.fork`."""
        ...

    def load(self, manifest: Manifest) -> Future[Proof]:
        """See `Engine.load`."""
        ...

    def score(self, token_ids: Int32Array) -> Future[Float32Array]:
        """See `Engine.score`."""
        ...

    def run(self) -> None:
        """Serve until stopped. When `run` returns, every open request has received its last delta."""
        ...

    def stop(self) -> None:
        """Make `run` return soon. Idempotent."""
        ...


Build = Callable[[WorkerLink, Config, Emit], EngineServer]
"""Builds the engine of a worker process. The builder reports its phases to the link, and calls `WorkerLink.ready` when
the engine can serve."""


def serve(link: WorkerLink, config: Config, build: Build) -> None:
    """Build the engine and serve it until the controller sends `Stop`."""

    def emit(deltas: list[Delta]) -> None:
        link.count_generated(sum(len(delta.token_ids) for delta in deltas))
        link.send(Deltas(deltas=deltas))

    link.phase = "loading"
    server = build(link, config, emit)
    threading.Thread(target=_pass_messages, args=(link, server), name="messages", daemon=True).start()
    server.run()


def _pass_messages(link: WorkerLink, server: EngineServer) -> None:
    """Pass the controller's messages to the engine, until the message is `Stop`."""
    while True:
        incoming = link.next_message()
        if incoming is None:
            continue
        match incoming.message:
            case Submit(requests=requests):
                server.submit(requests)
            case Abort(ids=ids):
                server.abort(ids)
            case Fork(request_id=request_id, at=at, n=n):
                _answer(link, incoming, server.fork(request_id, at, n), lambda requests: Forked(requests=requests))
            case Load(manifest=manifest):
                _answer(link, incoming, server.load(manifest), lambda proof: LoadProved(proof=proof))
            case ScoreTokens(token_ids=token_ids):
                _answer(link, incoming, server.score(token_ids), lambda logprobs: TokensScored(logprobs=logprobs))
            case Stop():
                link.phase = "stopping"
                server.stop()
                return
            case other:
                raise HeadraceError(f"an engine was sent a {type(other).__name__}")


def _answer(link: WorkerLink, incoming: Incoming, future: Future[T], wrap: Callable[[T], Message]) -> None:
    def done(settled: Future[T]) -> None:
        error = settled.exception()
        if error is not None:
            link.fail(incoming, f"{type(error).__name__}: {error}")
        else:
            link.reply(incoming, wrap(settled.result()))

    future.add_done_callback(done)


class RemoteEngine(StreamedEngine):
    """The controller's handle of an engine in another process: an `Engine` that is reached through a hub.

    Requests that are made in one turn of the event loop are sent as one message. At depth 0, the engine's whole
    schedule therefore follows from that one message.
    """

    def __init__(self, hub: Hub, name: str, *, load_deadline: float, token_deadline: float) -> None:
        super().__init__(name, deadline=token_deadline)
        self._hub = hub
        self._deadline = token_deadline
        self._load_deadline = load_deadline
        self._sending: set[asyncio.Task[None]] = set()

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._submitted()
        with contextlib.suppress(PeerDied):  # A dead process runs no requests.
            await self._hub.send(self.name, Abort(ids=None if ids is None else list(ids)))

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`."""
        await self._submitted()
        fork = Fork(request_id=request_id, at=at, n=n)
        return (await self._hub.request(self.name, fork, Forked, timeout=self._deadline)).requests

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        load = Load(manifest=manifest)
        return (await self._hub.request(self.name, load, LoadProved, timeout=self._load_deadline)).proof

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        score = ScoreTokens(token_ids=token_ids)
        return (await self._hub.request(self.name, score, TokensScored, timeout=self._deadline)).logprobs

    async def close(self) -> None:
        """End open requests as failed. The process itself is not touched: it belongs to its launcher."""
        self.lost("the engine was closed")
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _submitted(self) -> None:
        """Wait until earlier requests are sent. An abort that arrived before its request would do nothing."""
        self.flush()
        await asyncio.gather(*self._sending)

    def _submit(self, requests: list[Request]) -> None:
        self._spawn(self._hub.send(self.name, Submit(requests=requests)))

    def _withdraw(self, request_id: str) -> None:
        self._spawn(self._hub.send(self.name, Abort(ids=[request_id])))

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._sent(sending), name=f"{self.name} send")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> None:
        # If the engine's process has died, the send fails, and `lost` will end the request. It must not end here
        # already: the pool does not know of the death yet, so it could not resume the request on another engine.
        with contextlib.suppress(PeerDied):
            await sending
