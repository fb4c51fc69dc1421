"""The meeting of trainer ranks that share no run directory: the first says where it waits, and the others are told.

The controller knows the addresses of hosts, but not which of their ports are free. So the first rank takes a free port
and sends a `MeetingPoint`. A rank that sends a `MeetingRequest` is sent that point: at once, or when it is known.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from headrace.channel.codec import Message
from headrace.channel.heartbeats import Hello, MeetingPoint, MeetingRequest
from headrace.channel.hub import Hub
from headrace.errors import PeerDied


class Meeting:
    """The controller's part of the meeting."""

    def __init__(self, hub: Hub, ranks: Sequence[str]) -> None:
        """`ranks` are the names of all trainer ranks, the first one first."""
        self._hub = hub
        self._first, self._others = ranks[:1], ranks[1:]
        self._point: MeetingPoint | None = None
        self._asking: list[str] = []
        self._told: asyncio.Queue[tuple[str, MeetingPoint]] = asyncio.Queue()

    def heard(self, peer: str, message: Message) -> None:
        """Take note of a worker's message."""
        match message:
            case Hello() if peer in self._first:
                self._point = None  # That of a previous process.
            case MeetingPoint() if peer in self._first:
                self._point = message
            case MeetingRequest() if peer in self._others:
                self._asking.append(peer)
        if self._point is not None:
            for rank in self._asking:
                self._told.put_nowait((rank, self._point))
            self._asking.clear()

    async def tell(self) -> None:
        """Send the answers, for as long as this task runs."""
        while True:
            rank, point = await self._told.get()
            with contextlib.suppress(PeerDied):
                await self._hub.send(rank, point)
