"""A snapshot holds everything that a display shows, as one plain struct. Rates follow from several snapshots.

A display never asks the pipeline anything. The controller fills a snapshot at each tick and hands it over.
"""

from __future__ import annotations

from collections import deque

import msgspec


class ProcessActivity(msgspec.Struct, kw_only=True):
    """What a process is doing now, and how busy it was recently."""

    phase: str = ""
    busy_fraction: float = 0.0


class RunSnapshot(msgspec.Struct, kw_only=True):
    """The state of a run at one moment. Token counts are totals since the start, never rates."""

    phase: str = "starting"
    """The phase of the run: starting, warm start, evaluating, training, draining, ..."""
    version: int = 0
    versions_total: int = 0
    step: int = 0
    reward: float | None = None
    """The mean reward of the last step."""
    reward_mean: float | None = None
    """The moving mean of the reward."""
    heldout: float | None = None
    """The last held-out accuracy."""
    generated_tokens: int = 0
    trained_tokens: int = 0
    lag_histogram: dict[int, int] = {}
    """Lag -> the number of trained tokens with this lag."""
    lag_bound: int | None = None
    in_flight: int = 0
    capacity: int = 0
    ready: int = 0
    """The number of groups in flight that wait to be trained."""
    processes: dict[str, ProcessActivity] = {}
    message: str = ""

    @property
    def lag_mean(self) -> float | None:
        """The mean lag over all trained tokens."""
        tokens = sum(self.lag_histogram.values())
        return sum(lag * n for lag, n in self.lag_histogram.items()) / tokens if tokens else None

    @property
    def lag_max(self) -> int | None:
        """The largest lag of any token."""
        return max((lag for lag, n in self.lag_histogram.items() if n), default=None)

    def idle(self, role: str) -> float | None:
        """Return the mean idle fraction of the processes of a role (`engine`, `trainer`)."""
        busy = [activity.busy_fraction for name, activity in self.processes.items() if name.startswith(role + "-")]
        return 1.0 - sum(busy) / len(busy) if busy else None


class SlidingRate:
    """The rate at which a total grew over the last `window` seconds."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._points: deque[tuple[float, float]] = deque()

    def add(self, time: float, total: float) -> None:
        """Add the total at this time. A total that shrank (a resumed run) starts a new window."""
        points = self._points
        if points and total < points[-1][1]:
            points.clear()
        points.append((time, total))
        # The oldest point kept lies at or just before the start of the window, so that the rate always spans a whole
        # window.
        while len(points) > 2 and points[1][0] <= time - self._window:
            points.popleft()

    @property
    def per_second(self) -> float | None:
        """The rate per second; None until two points are known."""
        if len(self._points) < 2:
            return None
        (first, low), (last, high) = self._points[0], self._points[-1]
        return (high - low) / (last - first) if last > first else None


class Rates:
    """The tokens per second and the time left, computed from successive snapshots."""

    TOKEN_WINDOW = 15.0
    VERSION_WINDOW = 120.0

    def __init__(self) -> None:
        self._generated = SlidingRate(self.TOKEN_WINDOW)
        self._trained = SlidingRate(self.TOKEN_WINDOW)
        self._versions = SlidingRate(self.VERSION_WINDOW)
        self._remaining = 0

    def add(self, time: float, snapshot: RunSnapshot) -> None:
        """Add a snapshot, taken at this time."""
        self._generated.add(time, snapshot.generated_tokens)
        self._trained.add(time, snapshot.trained_tokens)
        self._remaining = snapshot.versions_total - snapshot.version
        if snapshot.phase == "training":
            # A start or an evaluation before training says nothing about the rate of versions.
            self._versions.add(time, snapshot.version)

    @property
    def generated(self) -> float | None:
        """The sampled tokens per second."""
        return self._generated.per_second

    @property
    def trained(self) -> float | None:
        """The trained tokens per second."""
        return self._trained.per_second

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the last version, at the rate of the last minutes."""
        pace = self._versions.per_second
        return max(0, self._remaining) / pace if pace else None
