"""Who holds a sender's places: at most two versions at a time, each from its write until it is released.

No place is given twice before it is released, and no wait for one is longer than its deadline. No torch here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from headrace.errors import DeliveryError

LIMIT = 2
"""One version that engines read, and one that the trainer writes meanwhile."""


class _Held(msgspec.Struct):
    """Who holds a place, and since when."""

    version: int
    since: float


class SenderPlaces:
    """The places of one sender, by location. All methods may be called from any thread."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free place; see `Sender.wait`."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout) or self._closed:
                raise self._refusal(version)

    def take(self, version: int, choose: Callable[[Collection[str]], str]) -> str:
        """Hold the location that `choose` picks, which is told those that are held; raises when there is no place."""
        with self._changed:
            if self._closed or not self._has_room():
                raise self._refusal(version)
            location = choose(self._held.keys())
            self._held[location] = _Held(version, time.monotonic())
            return location

    @contextmanager
    def filling(
        self, version: int, choose: Callable[[Collection[str]], str], release: Callable[[str], None]
    ) -> Iterator[str]:
        """As `take`, for a place that is filled inside; `release` lets go of it again unless that ends well."""
        location = self.take(version, choose)
        with ExitStack() as undo:
            undo.callback(release, location)
            yield location
            undo.pop_all()

    def holds(self, location: str) -> bool:
        """Whether this location is held."""
        with self._changed:
            return location in self._held

    def release(self, location: str) -> None:
        """Let go of a place. Idempotent."""
        with self._changed:
            self._held.pop(location, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Let go of all places; who waits or comes later is refused. Idempotent."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._closed or len(self._held) < LIMIT

    def _refusal(self, version: int) -> DeliveryError:
        if self._closed:
            return DeliveryError(f"no {self._noun} for version {version}: the transport is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held.version} ({now - held.since:.1f} s)" for held in self._held.values())
        return DeliveryError(f"no {self._noun} for version {version}: not acknowledged by the engines: {holders}")
