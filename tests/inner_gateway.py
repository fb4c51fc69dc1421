"""Both sides of the gateway in one process. Their messages are encoded and decoded as between two processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from headrace.channel.codec import Message, decode, encode
from headrace.errors import ChannelError, PeerDied, UserError
from headrace.gateway.agents import AgentPool
from headrace.gateway.base import Chat, TokenSource
from headrace.gateway.gateway import Gateway
from headrace.gateway.messages import Listening, Said
from headrace.gateway.relay import Relay
from headrace.gateway.serving import ItemHandler, Outbox


class InnerWire:
    """The gateway's process in this process: messages to it, and its answers. `die` and `begin` kill and restart it."""

    def __init__(self, chat: Chat, **more: Any) -> None:
        self._make = partial(Gateway, chat=chat, model="tiny", **{"max_length": 200, "max_tokens": 40, **more})
        self.relay: Relay | None = None
        self.gateway: Gateway | None = None
        self.sent = self.heard = 0
        """The numbers of messages in both directions."""

    def begin(self) -> None:
        def send(message: Message) -> None:
            if self.gateway is mine:
                self.heard += 1
                asyncio.get_running_loop().call_soon(self.relay.hear, _copied(message))

        outbox = Outbox(send)
        note = partial(self._note, outbox)
        self._handler = ItemHandler(outbox.put, lambda engine, whole: self._make(engine=engine, whole=whole, note=note))
        mine = self.gateway = self._handler.gateway

    def _note(self, outbox: Outbox, line: str) -> None:
        outbox.put(Said(line=line))

    async def die(self) -> None:
        gateway, self.gateway = self.gateway, None
        await gateway.close()

    async def send(self, peer: str, message: Message) -> None:
        if self.gateway is None:
            raise PeerDied(peer, "killed")
        self.sent += 1
        self._handler.hear(_copied(message))

    async def request(self, peer: str, message: Any, reply: Any, *, timeout: float) -> Any:
        if self.gateway is None:
            raise PeerDied(peer, "killed")
        try:
            return Listening(port=await self.gateway.listen(message.port, message.key))
        except UserError as error:
            raise ChannelError(f"{peer}: {error}") from error


def _copied(message: Message) -> Any:
    return decode(type(message), encode(message))


@asynccontextmanager
async def both_sides(
    engine: TokenSource,
    chat: Chat,
    *,
    agents: AgentPool | None = None,
    session_seconds: float = 20.0,
    port: int = 0,
    file: Path | None = None,
    **more: Any,
) -> AsyncIterator[Relay]:
    """A gateway that listens, as the controller sees it. `relay.wire` is its process."""
    wire = InnerWire(chat, **more)
    relay = wire.relay = Relay(
        "gateway-0", wire, engine, chat, model="tiny", max_turns=8, agents=agents,
        session_seconds=session_seconds, port=port, file=file,
    )  # fmt: skip
    wire.begin()
    sending = asyncio.create_task(relay.run())
    try:
        await relay.start()
        yield relay
    finally:
        sending.cancel()
        relay.close()
        if wire.gateway is not None:
            await wire.gateway.close()
