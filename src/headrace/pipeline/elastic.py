"""The rule by which a run chooses its number of engines: who waits for whom decides, without I/O or a clock.

One observation is the idle shares of trainer and engines over a version. The engines idle if they have no requests and
the window is full, so that no group may start. A version is

    starved   if the trainer was idle for more than half of the time and the engines were not: one more engine helps
    full      if the engines were idle for more than half of the time and the trainer was not: one engine less is enough

If both are idle, something else is slow, such as a reward or one long answer, and another number of engines would not
help. If `MOST` of the last `VERSIONS` observations are of one kind, the number changes by one, and the observations
begin anew. A change back, in the other direction than the last change, needs twice as many of them. If an engine makes
generation faster by no more than its share, half of the time leaves a margin: after a change the other side is not idle
for half of its time.
"""

from collections import deque
from typing import NamedTuple, Protocol

from headrace.engines.serving import RemoteEngine

VERSIONS, MOST = 4, 3
HALF = 0.5


class Idle(NamedTuple):
    """The shares of the time in which the trainer had no batch, and in which the mean engine had no request."""

    trainer: float
    engines: float

    @property
    def wish(self) -> int:
        """1 if one more engine would help, -1 if one engine less would be enough, 0 otherwise."""
        if (self.trainer > HALF) == (self.engines > HALF):
            return 0
        return 1 if self.trainer > HALF else -1


class Rule:
    """The rule of one run, which has between `least` and `most` engines."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self._wishes: deque[int] = deque(maxlen=2 * VERSIONS)
        self._last = 0

    def decide(self, engines: int, idle: Idle) -> int:
        """Take one observation of a run with so many engines. Return the change of their number: 1, 0 or -1."""
        self._wishes.append(idle.wish)
        wish = idle.wish
        times = 2 if wish == -self._last else 1
        recent = list(self._wishes)[-times * VERSIONS :]
        if not wish or len(recent) < times * VERSIONS or recent.count(wish) < times * MOST:
            return 0
        if not self.least <= engines + wish <= self.most:
            return 0
        self._last = wish
        self._wishes.clear()
        return wish

    def changed(self) -> None:
        """Begin the observations anew, because the number of engines was changed by a command."""
        self._wishes.clear()


class Crew(Protocol):
    """Starts and ends single engines of a live run. Their ranks count from 0, and a rank may be used again."""

    ranks: list[int]
    """The ranks of the engines with which the run began."""
    urls: list[str]
    """The given servers, by rank; empty if the run starts its engines itself."""

    def place(self, rank: int) -> None:
        """Raise `UserError` if there is no place for an engine of this rank."""

    def add_url(self, url: str) -> int:
        """Make a server known. Return its rank. Raises `UserError` if the run cannot use it."""

    async def start(self, rank: int) -> RemoteEngine:
        """Start an engine, and return it when it is ready. Raises `UserError` if it does not become ready."""

    async def end(self, rank: int) -> None:
        """End an engine, and return when its process has ended. It is not restarted."""
