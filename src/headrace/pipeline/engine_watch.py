"""Engines that answer and do nothing: whoever has requests and sends no token for too long is as good as dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class EngineWatch:
    """When each engine was last seen to make progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def progress(self, name: str) -> None:
        """This engine sent tokens, or the end of a request."""
        self._seen[name] = self._clock()

    def forget(self, name: str) -> None:
        """This engine is away; it begins anew when it is back."""
        self._seen.pop(name, None)

    def quiet(self, running: Mapping[str, int]) -> list[tuple[str, int, float]]:
        """(engine, its requests, seconds since it last did something about one) of those that have requests."""
        now = self._clock()
        return [(name, n, now - self._seen.get(name, now)) for name, n in running.items() if n]

    def stuck(self, running: Mapping[str, int], limit: float) -> list[str]:
        """The engines that have had requests for `limit` seconds and did nothing about any of them."""
        now, found = self._clock(), []
        for name, requests in running.items():
            if not requests:
                self.forget(name)
            elif now - self._seen.setdefault(name, now) > limit:
                found.append(name)
        return found
