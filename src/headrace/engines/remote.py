"""The controller's handle of an engine that runs in another process.

Requests that are made in one turn of the event loop are sent as one message. At depth 0, the engine's whole schedule
therefore follows from that one message.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Request
from headrace.engines.messages import Abort, Fork, Forked, Load, LoadProved, ScoreTokens, Submit, TokensScored
from headrace.engines.streams import StreamedEngine
from headrace.errors import PeerDied
from headrace.types import Float32Array, Int32Array

M = TypeVar("M", bound=Message)


class RemoteEngine(StreamedEngine):
    """An `Engine` and `EngineProcess` that is reached through a hub."""

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
        return (await self._ask(fork, Forked, self._deadline)).requests

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return (await self._ask(Load(manifest=manifest), LoadProved, self._load_deadline)).proof

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return (await self._ask(ScoreTokens(token_ids=token_ids), TokensScored, self._deadline)).logprobs

    async def close(self) -> None:
        """End open requests as failed. The process itself is not touched: it belongs to its launcher."""
        self.lost("the engine was closed")
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _ask(self, message: Message, reply: type[M], deadline: float) -> M:
        return await self._hub.request(self.name, message, reply, timeout=deadline)

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
