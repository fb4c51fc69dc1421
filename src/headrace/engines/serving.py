"""The engine role of a worker process: it passes messages between the controller and an `EngineServer`.

`EngineServer` is the protocol through which a worker process drives its engine, whatever kind of engine it is.
The engine runs in the main thread, and a second thread only passes messages. So a swap or an abort never waits for the
controller, and a slow controller never delays a decode step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.config import Config
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.engines.messages import Abort, Deltas, Fork, Forked, Load, LoadProved, ScoreTokens, Submit, TokensScored
from headrace.errors import HeadraceError
from headrace.types import Float32Array, Int32Array

T = TypeVar("T")

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
        link.spoke.send(Deltas(deltas=deltas))

    link.phase = "loading"
    server = build(link, config, emit)
    threading.Thread(target=pass_messages, args=(link, server), name="messages", daemon=True).start()
    server.run()


def pass_messages(link: WorkerLink, server: EngineServer) -> None:
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
            link.spoke.fail(incoming, f"{type(error).__name__}: {error}")
        else:
            link.spoke.reply(incoming, wrap(settled.result()))

    future.add_done_callback(done)
