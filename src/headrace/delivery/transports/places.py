"""The places of a sender: at most two versions hold one at a time, each from its write until its release.

A place that is held is not given to another version, and no wait for a place is longer than its deadline. This module
does not import torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from headrace.delivery.transports.base import Sender
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION

LIMIT = 2
"""The number of places: one for the version that engines read, and one that the trainer writes meanwhile."""


class _Held(msgspec.Struct):
    """The version that holds a place, and since when."""

    version: int
    since: float


class SenderPlaces:
    """The places of one sender, by location. All methods may be called from any thread."""

    def __init__(self, noun: str, owner: str = "transport") -> None:
        """Create the places; `noun` is what errors call a place, and `owner` is what they call its owner."""
        self._noun = noun
        self._owner = owner
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free place; see `Sender.wait`."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout) or self._closed:
                raise self._refusal(version)

    def take(self, version: int, choose: Callable[[Collection[str]], str]) -> str:
        """Hold the location that `choose` picks and return it.

        `choose` gets the locations that are held already. Raises `DeliveryError` if there is no free place.
        """
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
        """Take a place, as `take` does, for a block that fills it; `release` is called if the block fails."""
        location = self.take(version, choose)
        with ExitStack() as undo:
            undo.callback(release, location)
            yield location
            undo.pop_all()

    def holds(self, location: str) -> bool:
        """Return whether this location is held."""
        with self._changed:
            return location in self._held

    def release(self, location: str) -> None:
        """Free a place. Idempotent."""
        with self._changed:
            self._held.pop(location, None)
            self._changed.notify_all()

    def settled_before(self, version: int, timeout: float) -> bool:
        """Wait until no version before this one holds a place; return False if that takes longer than `timeout`."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or all(held.version >= version for held in self._held.values()), timeout
            )
            return done and not self._closed

    def close(self) -> None:
        """Free all places; threads that wait or come later get a `DeliveryError`. Idempotent."""
        with self._changed:
            self._closed = True
            self._held.clear()
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._closed or len(self._held) < LIMIT

    def _refusal(self, version: int) -> DeliveryError:
        if self._closed:
            return DeliveryError(f"no {self._noun} for version {version}: the {self._owner} is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held.version} ({now - held.since:.1f} s)" for held in self._held.values())
        return DeliveryError(f"no {self._noun} for version {version}: not acknowledged by the engines: {holders}")


class PlacedSender:
    """The methods that are the same for most senders with places of their own; see `Sender`."""

    def __init__(self, noun: str) -> None:
        """Create the places; `noun` is what errors call a place."""
        self._places = SenderPlaces(noun)

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free place; see `Sender.wait`."""
        self._places.wait(version, timeout)

    def finish(self, location: str) -> None:
        """Do nothing: a place is readable as soon as it is written."""

    def release(self, location: str) -> None:
        """Allow the place to be overwritten."""
        self._places.release(location)


class HeldPlaces:
    """The places of versions that engines may still fetch. All methods may be called from any thread.

    A version's places are released when it is acknowledged. With `keep_newest`, the newest version also stays until
    there is a newer one.
    """

    def __init__(self, sender: Sender, keep_newest: bool) -> None:
        self._sender = sender
        self._keep_newest = keep_newest
        self._locations: dict[int, list[str]] = {}
        self._acknowledged: set[int] = set()
        self._lock = threading.Lock()

    def written(self, version: int, location: str) -> None:
        """Record that this location holds this version; a version may be at several locations."""
        with self._lock:
            self._locations.setdefault(version, []).append(location)
            self._release()

    def acknowledged(self, version: int) -> None:
        """Record that no engine reads this version any more."""
        with self._lock:
            self._acknowledged.add(version)
            self._release()

    def _release(self) -> None:
        newest = max(self._locations, default=NO_VERSION) if self._keep_newest else NO_VERSION
        for version in [v for v in self._locations if v != newest and v in self._acknowledged]:
            for location in self._locations.pop(version):
                self._sender.release(location)
        self._acknowledged &= self._locations.keys()
