"""The queue of events: any part of a run adds events, and one owner takes them out in order.

No part of a run calls another back. A hub and a launcher only put events, and the controller matches on the events that
it takes.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from headrace.channel.codec import Message
from headrace.errors import PeerDied

LOOK_SECONDS = 1.0
"""`Events.take` returns after this many seconds even if no event came."""


@dataclass(frozen=True)
class Event:
    """The base class of events."""


@dataclass(frozen=True)
class Heard(Event):
    """A worker has sent a message that answers no request: tokens, a published version, a heartbeat."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Dropped(Event):
    """A message of a worker, or of a stranger, could not be read and was dropped."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Died(Event):
    """A worker process is gone."""

    death: PeerDied
    restarts: bool
    """Whether the worker is started again. If so, `Returned` follows when the new process is ready."""


@dataclass(frozen=True)
class Awaited(Event):
    """The host of a worker that died cannot be reached. The worker is started when the host is back."""

    peer: str
    reason: str


@dataclass(frozen=True)
class Returned(Event):
    """A worker that died was restarted and is ready."""

    peer: str
    facts: dict[str, int | float | str] = field(default_factory=dict)
    """What the new process reports about itself (see `heartbeats.Ready`)."""


class Events:
    """The queue of events. It is used from one event loop, by any number of producers and one consumer."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._bell = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event. Returns at once."""
        self._waiting.append(event)
        self._bell.set()

    def clear(self) -> None:
        """Discard all events so far, because they came before anybody was there to handle them."""
        self._waiting.clear()
        self._bell.clear()

    async def take(self) -> list[Event]:
        """Return all events so far, oldest first.

        Waits for one event, for at most `LOOK_SECONDS`; the list may be empty.
        """
        if not self._waiting:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._bell.wait()
            except TimeoutError:
                return []
        self._bell.clear()
        taken, self._waiting = list(self._waiting), deque()
        return taken
