"""The process of the gateway: its HTTP server, and the link to the controller.

    clients ──HTTP──▶ Gateway ──Ask──▶ the controller ──▶ engines
                         ▲                  │
                         └────── Sampled ◀──┘

The event loop of this process answers clients. The thread of the link passes the controller's messages to it. Messages
to the controller are collected during one turn of the event loop and sent together.
"""

import asyncio
from collections.abc import Callable

import msgspec

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.engines.base import Request
from headrace.engines.streams import StreamedEngine
from headrace.errors import HeadraceError
from headrace.gateway.base import TokenSource
from headrace.gateway.gateway import Gateway
from headrace.gateway.messages import (
    Ask,
    Close,
    Closed,
    FromGateway,
    FromGatewayItem,
    Listen,
    Listening,
    Open,
    Opened,
    Said,
    Sampled,
    ToGateway,
    Withdraw,
)
from headrace.gateway.session import Session
from headrace.types import Prompt

Put = Callable[[FromGatewayItem], None]


class Outbox:
    """Items for the controller, sent together at the end of a turn of the event loop."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._items: list[FromGatewayItem] = []

    def put(self, item: FromGatewayItem) -> None:
        """Add an item. It may only be called on the event loop."""
        self._items.append(item)
        if len(self._items) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Send the items so far."""
        items, self._items = self._items, []
        if items:
            self._send(FromGateway(items=items))


class RelayedEngine(StreamedEngine):
    """The engines of the run as the gateway sees them: requests travel through the controller."""

    def __init__(self, put: Put, *, whole: bool = False) -> None:
        """With `whole`, all tokens of a request come together when it has ended.

        There is no deadline here: the controller has one for every request, and this process ends with the controller.
        """
        super().__init__("engines")
        self._put = put
        self._whole = whole

    def _submit(self, requests: list[Request]) -> None:
        for request in requests:
            self._put(Ask(request=request, whole=self._whole))

    def _withdraw(self, request_id: str) -> None:
        self._put(Withdraw(request_id=request_id))


class ItemHandler:
    """Does what the controller's items ask for."""

    def __init__(self, put: Put, make: Callable[[RelayedEngine, RelayedEngine], Gateway]) -> None:
        """`make` makes the gateway over two ways to the engines; the second one returns whole answers."""
        self._engines = RelayedEngine(put), RelayedEngine(put, whole=True)
        self.gateway = make(*self._engines)
        self._put = put

    def hear(self, message: ToGateway) -> None:
        """Handle all items of a message."""
        for item in message.items:
            match item:
                case Sampled():
                    delta = item.delta()
                    for engine in self._engines:
                        engine.deliver([delta])
                case Open():
                    self._open(item)
                    self._put(Opened(session=item.session))
                case Close(session=id):
                    if (session := self.gateway.sessions.find(id)) is not None:
                        self.gateway.sessions.remove(session)
                    self._put(Closed(session=id))

    def _open(self, item: Open) -> None:
        prompt = msgspec.json.decode(item.offered, type=Prompt) if item.offered else Prompt(id="")
        session = Session(
            chat=self.gateway.chat,
            prompt=prompt,
            sampling=item.sampling,
            max_turns=item.max_turns,
            seconds=item.seconds,
            group=item.group,
            priority=item.priority,
            version=item.version,
            id=item.session,
            key=item.key,
            tell=self._put,
        )
        self.gateway.sessions.add(session, offered=bool(item.offered))


class GatewayRole:
    """The gateway as a worker."""

    def __init__(
        self, link: WorkerLink, make: Callable[[TokenSource, TokenSource, Callable[[str], None]], Gateway]
    ) -> None:
        """`make` makes the gateway over two ways to the engines (see `ItemHandler`), and gets a way to show lines."""
        self._link = link
        self._make = make

    def run(self) -> None:
        """Serve until the controller sends `Stop`. Raises any error of the event loop."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        outbox = Outbox(self._link.send)
        handler = ItemHandler(
            outbox.put, lambda engine, whole: self._make(engine, whole, lambda line: outbox.put(Said(line=line)))
        )
        gateway = handler.gateway
        inbox: asyncio.Queue[Incoming] = asyncio.Queue()
        self._link.pass_to(lambda incoming: loop.call_soon_threadsafe(inbox.put_nowait, incoming))
        self._link.ready()
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    incoming = await inbox.get()
                    match incoming.message:
                        case ToGateway() as message:
                            handler.hear(message)
                        case Listen(port=port, key=key):
                            try:
                                self._link.reply(incoming, Listening(port=await gateway.listen(port, key)))
                                tasks.create_task(gateway.watch(), name="watch the gateway")
                            except HeadraceError as error:
                                self._link.fail(incoming, str(error))
                        case Stop():
                            self._link.phase = "stopping"
                            return
            finally:
                self._link.pass_to(None)
                await gateway.close()
