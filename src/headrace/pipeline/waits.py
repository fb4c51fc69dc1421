"""Who waits for what, and since when. No loop waits without being in this book.

A wait ends when its condition holds; it is looked at again whenever somebody rings, and at least once a second. When
nothing at all has moved for too long, the watch loop turns the book into a `StallError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.errors import StallError

LOOK_SECONDS = 1.0


class Waits:
    """The book of waits, and the bell that ends them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved = clock()
        self._bell = asyncio.Event()
        self._book: dict[str, tuple[Callable[[], str], float]] = {}

    def ring(self) -> None:
        """Something has changed: everyone looks again."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def moved(self) -> None:
        """The run has made progress (tokens, a step, a delivery), and whoever waits for that looks again."""
        self._moved = self._clock()
        self.ring()

    async def until(self, owner: str, what: Callable[[], str], condition: Callable[[], bool]) -> None:
        """Wait for the condition; `what` says what for, in words, at the time it is asked."""
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
        """Every wait, the longest first."""
        lines = [f"{owner} waits for {what}, since {seconds:.0f} s" for owner, what, seconds in self.entries()]
        return "; ".join(lines) or "nobody waits"

    def entries(self) -> list[tuple[str, str, float]]:
        """(who, for what, since how many seconds) of every wait, the longest first."""
        now = self._clock()
        book = sorted(self._book.items(), key=lambda item: item[1][1])
        return [(owner, what(), now - since) for owner, (what, since) in book]

    @property
    def still(self) -> float:
        """Seconds since the run last made progress."""
        return self._clock() - self._moved

    def check(self, limit: float) -> None:
        """Raise `StallError` when nothing has moved for `limit` seconds."""
        still = self._clock() - self._moved
        if still > limit:
            raise StallError(f"no progress for {still:.0f} s: {self.report()}")
