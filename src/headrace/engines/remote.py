"""An engine in another process, as the controller sees it.

Requests made in one turn of the event loop travel as one message: what the engine sees between two of its steps does
not depend on how fast the controller is, and at depth 0 the whole schedule follows from that one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, EngineStats, Request, failed_delta
from headrace.engines.messages import (
    Abort,
    AskStats,
    Deltas,
    Load,
    Pause,
    Proved,
    Resume,
    Score,
    Scored,
    Stats,
    Submit,
)
from headrace.errors import ChannelError, DeadlineError
from headrace.types import Float32Array, Int32Array

M = TypeVar("M", bound=Message)


class RemoteEngine:
    """Implements `Engine` over a hub. `deliver` takes the process's messages, `lost` the news of its death."""

    def __init__(self, hub: Hub, name: str, *, load_deadline: float, token_deadline: float) -> None:
        self.name = name
        self._hub = hub
        self._load_deadline = load_deadline
        self._token_deadline = token_deadline
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._outbox: list[Request] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._death: str | None = None

    def deliver(self, message: Deltas) -> None:
        """Hand deltas to whoever waits for them; those of requests given up are dropped."""
        for delta in message.deltas:
            if stream := self._streams.get(delta.id):
                stream.put_nowait(delta)

    def lost(self, reason: str) -> None:
        """The process is gone: every open request ends as failed."""
        self._death = reason
        for request_id, stream in self._streams.items():
            stream.put_nowait(failed_delta(request_id, reason))

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        if self._death is not None or request.id in self._streams:
            yield failed_delta(request.id, self._death or f"a request with id {request.id!r} is already running")
            return
        stream = self._streams[request.id] = asyncio.Queue()
        finished = False
        try:
            self._post(request)
            while not finished:
                delta = await self._next(request.id, stream)
                finished = delta.finish is not None
                yield delta
        finally:
            del self._streams[request.id]
            if not finished and self._death is None:
                self._spawn(self._hub.send(self.name, Abort(ids=[request.id])))

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self._flush()
        await self._hub.send(self.name, Abort(ids=None if ids is None else list(ids)))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._hub.send(self.name, Pause())

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._hub.send(self.name, Resume())

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return (await self._ask(Load(manifest=manifest), Proved, self._load_deadline)).proof

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return (await self._ask(Score(token_ids=token_ids), Scored, self._token_deadline)).logprobs

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return (await self._ask(AskStats(), Stats, self._token_deadline)).stats

    async def close(self) -> None:
        """Let go of open requests; the process itself belongs to its launcher."""
        self.lost("the engine was closed")
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _ask(self, message: Message, reply: type[M], deadline: float) -> M:
        return await self._hub.request(self.name, message, reply, timeout=deadline)

    async def _next(self, request_id: str, stream: asyncio.Queue[Delta]) -> Delta:
        try:
            async with asyncio.timeout(self._token_deadline):
                return await stream.get()
        except TimeoutError as error:
            waited = f"{self.name} sent nothing for request {request_id} in {self._token_deadline:g} s"
            raise DeadlineError(waited) from error

    def _post(self, request: Request) -> None:
        self._outbox.append(request)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        requests, self._outbox = self._outbox, []
        if not requests:
            return
        self._spawn(self._hub.send(self.name, Submit(requests=requests)))

    def _spawn(self, sending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(self._sent(sending), name=f"{self.name} send")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _sent(self, sending: Coroutine[Any, Any, None]) -> None:
        try:
            await sending
        except ChannelError as error:
            self.lost(str(error))
