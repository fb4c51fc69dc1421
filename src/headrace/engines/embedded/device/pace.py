"""Decides how many steps a launch has: enough that the device never waits for the host, and no more.

An enqueued launch cannot be cancelled, and new weights wait until it ends. So launches are short, but long enough for
the host to keep up. One launch is in flight while the host plans the next. After new weights have arrived, no launch is
enqueued behind another. If the last check of weights took less than one step, nothing is launched between arrival and
swap: the device is then idle for at most one step, and the swap does not wait for a launch.
"""

import math
import time
from collections.abc import Callable

from headrace.engines.embedded.base import Haste

STEPS = 8
"""The largest number of decode steps in one launch. A row that ends is idle for up to this many steps."""
LAUNCHES = 1
"""The number of launches in flight while the host plans the next one. A launch lasts longer than planning takes."""
LAUNCH_SECONDS = 2e-3
"""A launch that lasts this long needs no more steps, unless the host is slower."""
SLACK = 1.5
"""A launch lasts this many times as long as the host needs for a launch, so that a slow turn leaves no gap."""
NOTICE_SECONDS = 2e-3
"""Checked weights should be installed within this time. If they are not, steps continue."""
LONGEST_TURN = 0.05
"""The longest turn (the host's work for one launch) that counts in full. A longer turn included a graph capture or a
wait, so its length does not predict that of the next turn."""
_NEW = 0.1
"""The weight of the newest measurement in a running mean."""


class Pace:
    """Running means of the time of a step and of the host's turns, and the launch lengths that follow from them.

    Until both times are known, a launch has the largest number of steps.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.haste: Haste = "none"
        self.single = False
        """Whether the next launch has one step only, because its token is awaited."""
        self._step: float | None = None
        self._turn: float | None = None
        self._prompts: float | None = None
        self._arrived: float | None = None
        self._proof = math.inf
        """The time from the arrival of the last weights until they were checked, in seconds."""
        self._held_until = -math.inf

    def hurry(self, haste: Haste) -> None:
        """Record that new weights have arrived (`soon`), are checked (`now`), or are no longer awaited (`none`).

        This method may be called from any thread.
        """
        now, step = self._clock(), self._step or math.inf
        if haste == "soon":
            self._arrived = now
            self._held_until = now + step if self._proof < step < math.inf else now
        elif haste == "now":
            # If steps were held back for the check, the device has waited since the weights arrived.
            since = self._arrived if self._arrived is not None and self.held else now
            if self._arrived is not None:
                self._proof = now - self._arrived
            self._held_until = min(now + NOTICE_SECONDS, since + step)
        self.haste = haste

    @property
    def held(self) -> bool:
        """Whether new weights will be ready so soon that no step may begin before them."""
        return self.haste != "none" and self._clock() < self._held_until

    @property
    def steps(self) -> int:
        """The number of steps of the next launch."""
        return self._steps_for(self._wanted)

    @property
    def cover(self) -> int:
        """The number of steps that last about as long as the host needs to enqueue a pass over prompts."""
        return self._steps_for(self._prompts)

    def spare(self, steps: int) -> float:
        """Return by how many seconds a launch of this many steps is longer than a launch should be; see `_wanted`."""
        if not self._step or self._wanted is None:
            return 0.0
        return max(0.0, steps * self._step - self._wanted)

    @property
    def _wanted(self) -> float | None:
        """The seconds that a launch should last; None if the host's turns are not known yet."""
        return None if self._turn is None else max(LAUNCH_SECONDS, SLACK * self._turn)

    def _steps_for(self, seconds: float | None) -> int:
        if self.single or self.haste != "none":
            return 1
        if not self._step or seconds is None:
            return STEPS
        return max(1, math.ceil(min(STEPS, seconds / self._step)))

    def stepped(self, seconds: float) -> None:
        """Record how long a decode step took on the device."""
        self._step = _follow(self._step, seconds)

    def enqueued_prompts(self, seconds: float) -> None:
        """Record how long the host needed to enqueue a pass over prompts."""
        self._prompts = _follow(self._prompts, min(seconds, LONGEST_TURN))

    def turned(self, seconds: float) -> None:
        """Record how long the host worked for one launch: reading, planning and launching, without waiting."""
        self._turn = _follow(self._turn, min(seconds, LONGEST_TURN))


def _follow(known: float | None, new: float) -> float:
    return new if known is None else known + _NEW * (new - known)
