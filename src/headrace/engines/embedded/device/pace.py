"""How much is launched at once: enough that the device never waits for the host, and no more.

What is under way can not be called back, and new weights get their turn behind it. So launches are as short as the host
can follow, one is under way while the next is planned, and none is begun behind another once weights have arrived. Nor
is one begun before them, if their proof takes less than a step: they would wait longer than the device stands still,
which is never longer than a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headrace.engines.embedded.base import Haste

STEPS = 8
"""Decode steps of one launch at most: an ended row idles for as many."""
LAUNCHES = 1
"""Launches that are under way while the host plans the next: each lasts longer than that takes."""
LAUNCH_SECONDS = 2e-3
"""A launch that lasts longer need not have more steps."""
SLACK = 1.5
"""A launch lasts this many times what the host needs for one, so that a slow turn of the host is no gap."""
NOTICE_SECONDS = 2e-3
"""Within so long proved weights are installed, by whoever was told of them; if not, steps go on."""
LONGEST_TURN = 0.05
"""A turn of the host that lasts longer captured a step or waited for somebody, and says nothing of the next."""
_NEW = 0.1
"""Weight of the newest measurement."""


class Pace:
    """Follows what steps and the host's turns take; until it knows, launches have as many steps as they may."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.haste: Haste = "none"
        self.single = False
        """The next launch is of one step: somebody waits for its token."""
        self._step: float | None = None
        self._turn: float | None = None
        self._prompts: float | None = None
        self._arrived: float | None = None
        self._proof = math.inf
        """Seconds from the last weights' arrival until they were proved."""
        self._held_until = -math.inf

    def hurry(self, haste: Haste) -> None:
        """New weights have arrived, are proved, or nobody waits any more. From any thread."""
        now, step = self._clock(), self._step or math.inf
        if haste == "soon":
            self._arrived = now
            self._held_until = now + step if self._proof < step < math.inf else now
        elif haste == "now":
            # Steps that were not begun for the proof have waited since the weights arrived.
            since = self._arrived if self._arrived is not None and self.held else now
            if self._arrived is not None:
                self._proof = now - self._arrived
            self._held_until = min(now + NOTICE_SECONDS, since + step)
        self.haste = haste

    @property
    def held(self) -> bool:
        """Whether new weights are so near that no step is begun before them."""
        return self.haste != "none" and self._clock() < self._held_until

    @property
    def steps(self) -> int:
        """Steps of the next launch."""
        if self.single or self.haste != "none":
            return 1
        if not self._step or self._turn is None:
            return STEPS
        wanted = max(LAUNCH_SECONDS, SLACK * self._turn)
        return math.ceil(min(STEPS, wanted / self._step))

    @property
    def cover(self) -> int:
        """Steps that last about as long as the host needs to enqueue a pass over prompts."""
        if self.single or self.haste != "none":
            return 1
        if not self._step or self._prompts is None:
            return STEPS
        return max(1, math.ceil(min(STEPS, self._prompts / self._step)))

    def spare(self, steps: int) -> float:
        """Seconds of a launch of so many steps that are more than the host needs to have the next one ready."""
        if not self._step or self._turn is None:
            return 0.0
        return max(0.0, steps * self._step - max(LAUNCH_SECONDS, SLACK * self._turn))

    def stepped(self, seconds: float) -> None:
        """A decode step took the device so long."""
        self._step = _follow(self._step, seconds)

    def enqueued_prompts(self, seconds: float) -> None:
        """The host needed so long for a pass over prompts."""
        self._prompts = _follow(self._prompts, min(seconds, LONGEST_TURN))

    def turned(self, seconds: float) -> None:
        """The host was busy so long for one launch: with reading, planning and launching, not with waiting."""
        self._turn = _follow(self._turn, min(seconds, LONGEST_TURN))


def _follow(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)
