"""One queue of events: whoever learns something puts it here, and one owner takes events out in their order.

No part of a run is called back by another: a hub and a launcher only put, and the controller matches on what it takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from headrace.channel.codec import Message
from headrace.errors import PeerDied

LOOK_SECONDS = 1.0
"""`Events.take` returns after this time even if nothing came."""


@dataclass(frozen=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True)
class Heard(Event):
    """A worker has sent a message that answers no request: tokens, a published version, a heartbeat."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Died(Event):
    """A worker process is gone."""

    death: PeerDied
    restarts: bool
    """Whether it is started again; `Returned` follows when it is ready."""


@dataclass(frozen=True)
class Returned(Event):
    """A worker that had died was started again and is ready."""

    peer: str
    facts: dict[str, int | float | str] = field(default_factory=dict)
    """What the new process says about itself (see `beats.Ready`)."""


class Events:
    """The queue. Used from one event loop: any number of producers, one consumer."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._bell = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event; returns at once."""
        self._waiting.append(event)
        self._bell.set()

    def clear(self) -> None:
        """Forget what came so far: there was nobody yet whom it concerned."""
        self._waiting.clear()
        self._bell.clear()

    async def take(self) -> list[Event]:
        """All events so far, oldest first: as soon as there is one, or an empty list after `LOOK_SECONDS`."""
        if not self._waiting:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._bell.wait()
            except TimeoutError:
                return []
        self._bell.clear()
        taken, self._waiting = list(self._waiting), deque()
        return taken
