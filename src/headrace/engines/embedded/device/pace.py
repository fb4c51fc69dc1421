"""How much is launched at once: enough that the device never waits for the host, and no more.

What is under way can not be called back, and new weights get their turn behind it. So launches are as short as the host
can follow, and of one step when weights are about to be installed.
"""

from __future__ import annotations

import math

STEPS = 8
"""Decode steps of one launch at most: an ended row idles for as many."""
LAUNCHES = 2
"""Launches that may be under way when the host waits for the first of them."""
HURRIED_LAUNCHES = 1
"""The same when weights are about to be installed."""
LAUNCH_SECONDS = 4e-3
"""A launch that lasts longer need not have more steps."""
SLACK = 2.0
"""A launch lasts this many times what the host needs for one, so that a slow turn of the host is no gap."""
_NEW = 0.1
"""Weight of the newest measurement."""


class Pace:
    """Follows what steps and the host's turns take; until it knows, launches have as many steps as they may."""

    def __init__(self) -> None:
        self.hurried = False
        self._step: float | None = None
        self._turn: float | None = None

    @property
    def steps(self) -> int:
        """Steps of the next launch."""
        if self.hurried:
            return 1
        if not self._step or self._turn is None:
            return STEPS
        wanted = max(LAUNCH_SECONDS, SLACK * self._turn)
        return math.ceil(min(STEPS, wanted / self._step))

    @property
    def launches(self) -> int:
        """Launches that may be under way."""
        return HURRIED_LAUNCHES if self.hurried else LAUNCHES

    def stepped(self, seconds: float) -> None:
        """A decode step took the device so long."""
        self._step = _follow(self._step, seconds)

    def turned(self, seconds: float) -> None:
        """The host was busy so long between waiting for one launch and waiting for the next."""
        self._turn = _follow(self._turn, seconds)


def _follow(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)
