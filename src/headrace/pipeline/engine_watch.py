"""This module detects stuck engines: an engine that has requests and sends no token for too long is treated as dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class EngineWatch:
    """The record of when each engine last made progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def progress(self, name: str) -> None:
        """Record that this engine sent tokens, or the end of a request."""
        self._seen[name] = self._clock()

    def forget(self, name: str) -> None:
        """Forget when this engine last made progress, because it is away or has no requests. Its time starts anew."""
        self._seen.pop(name, None)

    def quiet(self, running: Mapping[str, int]) -> list[tuple[str, int, float]]:
        """Return (engine, number of requests, seconds without progress) for every engine that has requests."""
        now = self._clock()
        return [(name, n, now - self._seen.get(name, now)) for name, n in running.items() if n]

    def stuck(self, running: Mapping[str, int], limit: float) -> list[str]:
        """Return the engines that have had requests for more than `limit` seconds without progress on any of them."""
        now, found = self._clock(), []
        for name, requests in running.items():
            if not requests:
                self.forget(name)
            elif now - self._seen.setdefault(name, now) > limit:
                found.append(name)
        return found
