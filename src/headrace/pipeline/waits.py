"""The register of waits: who waits for what, and since when.

No loop of the pipeline waits without being registered here. A wait ends when its condition holds. The condition is
checked again whenever `ring` is called, and at least once a second. If nothing has made progress for too long, the
watch loop reports all waits in a `StallError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.errors import StallError

LOOK_SECONDS = 1.0


class Waits:
    """The register of waits, and the bell that wakes them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved = clock()
        self._bell = asyncio.Event()
        self._book: dict[str, tuple[Callable[[], str], float]] = {}

    def ring(self) -> None:
        """Make every wait check its condition again, because something has changed."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def moved(self) -> None:
        """Record that the run has made progress (tokens, a step, a delivery), and wake every wait."""
        self._moved = self._clock()
        self.ring()

    async def until(self, owner: str, what: Callable[[], str], condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. `what` returns, in words and at the time of the call, what is waited for."""
        if condition():
            return
        self._book[owner] = (what, self._clock())
        try:
            while not condition():
                bell = self._bell
                try:
                    async with asyncio.timeout(LOOK_SECONDS):
                        await bell.wait()
                except TimeoutError:
                    continue
        finally:
            del self._book[owner]

    def report(self) -> str:
        """Return all waits in one line, the longest first."""
        lines = [f"{owner} waits for {what}, since {seconds:.0f} s" for owner, what, seconds in self.entries()]
        return "; ".join(lines) or "nobody waits"

    def entries(self) -> list[tuple[str, str, float]]:
        """Return (owner, what it waits for, seconds) for every wait, the longest first."""
        now = self._clock()
        book = sorted(self._book.items(), key=lambda item: item[1][1])
        return [(owner, what(), now - since) for owner, (what, since) in book]

    @property
    def still(self) -> float:
        """The seconds since the run last made progress."""
        return self._clock() - self._moved

    def check(self, limit: float) -> None:
        """Raise `StallError` if nothing has made progress for `limit` seconds."""
        still = self._clock() - self._moved
        if still > limit:
            raise StallError(f"no progress for {still:.0f} s: {self.report()}")
