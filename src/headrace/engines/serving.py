"""An engine in a worker process: the messages, and the controller's end (`RemoteEngine`).

At the worker's end, `EventLoopServer` answers the messages for any asyncio engine, and `embedded.building` for the
embedded engine. If an engine depends on something outside of its process and that is lost, the process ends, and open
requests and questions get no answer. The supervisor then restarts the process, and the requests are resumed on other
engines.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.engines.streams import StreamedEngine
from headrace.errors import HeadraceError, PeerDied
from headrace.types import Float32Array, Int32Array


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


def send_deltas(link: WorkerLink, deltas: list[Delta]) -> None:
    """Send new tokens of any number of requests from a worker to the controller."""
    link.count_generated(sum(len(delta.token_ids) for delta in deltas))
    link.send(Deltas(deltas=deltas))


def begin(message: Message, engine: Any) -> tuple[Any, Callable[[Any], Message] | None]:
    """Begin what a message asks of an engine that has the methods `abort`, `fork`, `load` and `score`.

    Returns the call's pending result (a future or a coroutine), and the function that makes the reply of it, if the
    message gets a reply.
    """
    match message:
        case Abort(ids=ids):
            return engine.abort(ids), None
        case Fork(request_id=request_id, at=at, n=n):
            return engine.fork(request_id, at, n), lambda requests: Forked(requests=requests)
        case Load(manifest=manifest):
            return engine.load(manifest), lambda proof: LoadProved(proof=proof)
        case ScoreTokens(token_ids=token_ids):
            return engine.score(token_ids), lambda logprobs: TokensScored(logprobs=logprobs)
    raise HeadraceError(f"an engine was sent a {type(message).__name__}")


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
