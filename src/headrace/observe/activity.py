"""How busy each process is and how fast it generates, from heartbeat to heartbeat. Every second is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.observe.spans import TimeSpan, busy_seconds


class HeartbeatFacts(Protocol):
    """The fields that a heartbeat must have. `headrace.channel.heartbeats.Heartbeat` has them."""

    @property
    def time(self) -> float:
        """The time on the sender's monotonic clock."""
        ...

    @property
    def spans(self) -> Sequence[TimeSpan]:
        """What the sender did since its last heartbeat."""
        ...

    @property
    def generated_tokens(self) -> int:
        """The number of tokens generated since the sender's last heartbeat."""
        ...


class Interval(NamedTuple):
    """What a process did between two heartbeats. Times are monotonic."""

    started: float
    ended: float
    busy: float
    """The busy time in seconds."""
    tokens: int
    """The number of generated tokens."""

    @property
    def busy_fraction(self) -> float:
        """The busy fraction; 0 for the first heartbeat, before which nothing is known."""
        return self.busy / (self.ended - self.started) if self.ended > self.started else 0.0

    @property
    def rate(self) -> float:
        """The generated tokens per second."""
        return self.tokens / (self.ended - self.started) if self.ended > self.started else 0.0


class Activity:
    """The last heartbeats of all processes."""

    def __init__(self) -> None:
        self._last_beat: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        """Process -> tokens per second at its last heartbeat."""

    def beat(self, process: str, beat: HeartbeatFacts) -> Interval:
        """Return what the process did since its last heartbeat."""
        started = self._last_beat.get(process, beat.time)
        self._last_beat[process] = beat.time
        busy = busy_seconds(beat.spans, started, beat.time)
        interval = Interval(started, beat.time, busy, beat.generated_tokens)
        self._rates[process] = interval.rate
        return interval

    def died(self, process: str) -> float:
        """Forget a process that has ended, and return its last tokens per second."""
        return self._rates.pop(process, 0.0)
