"""How busy each process is and how fast it generates, from beat to beat: every second is counted once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from headrace.observe.spans import TimeSpan, busy_seconds


class HeartbeatFacts(Protocol):
    """What a heartbeat must say; `headrace.channel.heartbeats.Heartbeat` does."""

    @property
    def time(self) -> float:
        """The sender's monotonic clock."""
        ...

    @property
    def spans(self) -> Sequence[TimeSpan]:
        """What the sender did since its last beat."""
        ...

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since the sender's last beat."""
        ...


class Interval(NamedTuple):
    """What a process did between two beats; times are monotonic."""

    started: float
    ended: float
    busy: float
    """Seconds."""
    tokens: int
    """Generated."""

    @property
    def busy_fraction(self) -> float:
        """0 for the first beat, before which nothing is known."""
        return self.busy / (self.ended - self.started) if self.ended > self.started else 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / (self.ended - self.started) if self.ended > self.started else 0.0


class Activity:
    """The last beats of all processes."""

    def __init__(self) -> None:
        self._last_beat: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        """Process -> tokens a second, at its last beat."""

    def beat(self, process: str, beat: HeartbeatFacts) -> Interval:
        """What the process did since its last beat."""
        started = self._last_beat.get(process, beat.time)
        self._last_beat[process] = beat.time
        busy = busy_seconds(beat.spans, started, beat.time)
        interval = Interval(started, beat.time, busy, beat.generated_tokens)
        self._rates[process] = interval.rate
        return interval

    def died(self, process: str) -> float:
        """Tokens a second of a process that is no more."""
        return self._rates.pop(process, 0.0)
