"""A record of which places of a sender hold which versions; a place is released once no engine needs its version.

This module does not import torch.
"""

from __future__ import annotations

import threading

from headrace.delivery.transports.base import Sender
from headrace.types import NO_VERSION


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
