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

from headrace.errors import DeliveryError

LIMIT = 2
"""The number of places: one for the version that engines read, and one that the trainer writes meanwhile."""


class _Held(msgspec.Struct):
    """The version that holds a place, and since when."""

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
            return DeliveryError(f"no {self._noun} for version {version}: the transport is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held.version} ({now - held.since:.1f} s)" for held in self._held.values())
        return DeliveryError(f"no {self._noun} for version {version}: not acknowledged by the engines: {holders}")
