"""The log `metrics.jsonl`, append-only with one JSON object per line, the trackers that follow it, and length drift.

A record is given to the operating system as soon as it is written, so a killed process loses no earlier record. There
is no fsync, so a power failure may lose the last records. A process that is killed during a write may leave half a
line. The next writer ends that line, and the reader skips it.

Trackers get every record as soon as it is written. Their failures and waits never reach the run. A tracker belongs to
the user. One thread that nothing else uses calls it, so it may wait for a network. A tracker that raises, or that falls
too far behind, is switched off with one note, and the run continues.
"""

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import UserError
from headrace.observe.curves import rewards_of
from headrace.reference import describe, import_function
from headrace.types import Group, without_republished

ROOM = 10_000
"""The number of records that may wait for a tracker."""
POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0
"""Seconds that a tracker has for the remaining records when the run ends."""

MEMORY = 2048
"""The number of latest generated rollouts that are compared with the trained ones among them."""
FEWEST = 256
"""With fewer rollouts than this of either kind, nothing is reported."""
TOLERANCE = 0.1
CRITICAL = 1.95
"""This factor times sqrt(1/n + 1/m) is a distance that equal distributions exceed once in a thousand times."""

Record = Mapping[str, Any]


class Tracker(Protocol):
    """A tracker follows one run. The configuration names a callable without arguments that returns a tracker."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run of this name. `config` is the whole configuration as dictionaries."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record, as in a line of `metrics.jsonl`: `time`, `kind` ("step", "version", ...) and its fields."""

    def close(self) -> None:
        """End the run, whether it succeeded or failed. No call comes after this one."""


class Trackers:
    """The trackers of one run. Not thread-safe: one thread uses it."""

    def __init__(
        self, references: Sequence[str], run: str, config: Mapping[str, Any], note: Callable[[str], None]
    ) -> None:
        """Load and start the trackers. `note` is called for each tracker that is switched off."""
        self._note = note
        self._feeds = [_Feed(reference, import_function(reference), run, config) for reference in references]

    def log(self, record: Record) -> None:
        """Hand a record to every tracker. Never waits."""
        for feed in self._feeds:
            feed.log(record)
        self._drop_failed()

    def close(self) -> None:
        """Let every tracker finish and close, within `CLOSE_SECONDS` each. Idempotent."""
        for feed in self._feeds:
            feed.close()
        self._drop_failed()
        self._feeds = []

    def _drop_failed(self) -> None:
        for feed in [feed for feed in self._feeds if feed.failure]:
            self._note(f"[observe] trackers: {feed.reference} {feed.failure}; it is switched off")
            self._feeds.remove(feed)


class _Feed:
    """One tracker, its thread, and the records that wait for it."""

    def __init__(self, reference: str, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        self.reference = reference
        self.failure = ""
        """Why the tracker gets no more records; empty while it gets them."""
        self._records: queue.Queue[Record | None] = queue.Queue(ROOM)
        self._thread = threading.Thread(
            target=self._serve, args=(make, run, config), name=f"tracker {reference}", daemon=True
        )
        self._thread.start()

    def log(self, record: Record | None) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.failure = self.failure or f"is {ROOM} records behind"

    def close(self) -> None:
        self.log(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self.failure = self.failure or f"did not close in {CLOSE_SECONDS:g} s"

    def _serve(self, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        try:
            self._follow(make, run, config)
        except UserError as error:
            self.failure = str(error)

    def _follow(self, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        """Give the tracker its records until the run ends. Whatever the user's code raises becomes a `UserError`."""
        try:
            tracker = make()
            tracker.start(run, config)
            try:
                while (record := self._next()) is not None:
                    tracker.log(record)
            finally:
                tracker.close()
        except (Exception, SystemExit) as error:
            raise UserError(f"raised {describe(error)}") from error

    def _next(self) -> Record | None:
        """Return the next record; None when the run has ended or the tracker is switched off."""
        while not self.failure:
            with suppress(queue.Empty):
                return self._records.get(timeout=POLL_SECONDS)
        return None


class MetricsLog:
    """A log that appends records `{"time": seconds since 1970, "kind": ..., ...}`. Only one thread may use it."""

    def __init__(self, path: Path, *, trackers: Trackers | None = None) -> None:
        """Open the log. Each record goes to the trackers too, and the trackers are closed with the file."""
        self._trackers = trackers
        # Unbuffered, so that each record is one write, and no finished record is lost with the process.
        self._file = path.open("a+b", buffering=0)
        if self._file.tell() > 0:
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record. Numbers that JSON cannot write (NaN, infinity) become null."""
        record = {"time": time.time(), "kind": kind, **fields}
        line = msgspec.json.encode(record, enc_hook=_plain)
        self._file.write(line + b"\n")
        if self._trackers is not None:
            self._trackers.log(msgspec.json.decode(line))

    def close(self) -> None:
        """Close the file and the trackers. Idempotent."""
        self._file.close()
        if self._trackers is not None:
            self._trackers.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all whole records of a log, in order. Incomplete lines are skipped; a missing log is empty."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    with path.open("rb") as file:
        for line in file:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                records.append(msgspec.json.decode(line, type=dict[str, Any]))
    return records


def reported_step(path: Path) -> int:
    """Return the last policy step in a log, or the step from which the run was resumed after it; 0 if there is none."""
    last = 0
    for record in read_metrics(path):
        step, kind = record.get("step"), record.get("kind")
        if isinstance(step, int) and (kind == "resumed" or (kind == "step" and record.get("objective") == "policy")):
            last = step
    return last


def describe_end(group: Group, outcome: str, version: int, republished: Sequence[int]) -> dict[str, Any]:
    """Describe how a group ended, as a record: the length of its answers, the difficulty of its prompt, and its age.

    A version that was published again makes no group older.
    """
    usable = group.usable
    rewards = rewards_of(group)
    oldest = [trace.oldest_version for rollout in usable for trace in rollout.traces if trace.trained.any()]

    def behind(older: int) -> int:
        return int(without_republished(version, republished) - without_republished(older, republished))

    return {
        "group": group.id,
        "outcome": outcome,
        "tokens": float(np.mean([rollout.sampled_tokens for rollout in usable])) if usable else None,
        "longest": max((rollout.sampled_tokens for rollout in usable), default=None),
        "reward": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "truncated": float(np.mean([rollout.ending == "truncated" for rollout in usable])) if usable else None,
        "age": behind(group.version),
        "lag": behind(min(oldest)) if oldest else None,
    }


def ks_distance(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Return the largest difference between the two empirical distribution functions."""
    both = np.union1d(first, second)
    cumulative = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


class LengthDrift:
    """The lengths of the answers of the latest groups, all of them and the trained ones.

    Dropping or filtering may favour short answers. Both samples are of the same groups, so that lengths which merely
    change from step to step are no difference. A warning needs a Kolmogorov-Smirnov distance that chance does not
    explain.
    """

    def __init__(self) -> None:
        self._groups: deque[tuple[list[int], list[int]]] = deque()
        self._answers = 0
        self._warned = False

    def ended(self, generated: Sequence[int], trained: Sequence[int]) -> None:
        """Take a group that has ended: the lengths of all its answers, and of those that were trained."""
        self._groups.append((list(generated), list(trained)))
        self._answers += len(generated)
        while self._answers - len(self._groups[0][0]) >= MEMORY:
            self._answers -= len(self._groups.popleft()[0])

    def _samples(self) -> tuple[list[int], list[int]]:
        return [n for all_, _ in self._groups for n in all_], [n for _, kept in self._groups for n in kept]

    def distance(self) -> float | None:
        """Return the distance between the two samples; None until both are large enough."""
        generated, trained = self._samples()
        if min(len(generated), len(trained)) < FEWEST:
            return None
        return ks_distance(np.array(generated, np.int64), np.array(trained, np.int64))

    def warning(self) -> str | None:
        """Return a line when the distance becomes too large; it is repeated only after the distance was small."""
        distance = self.distance()
        if distance is None:
            return None
        generated, trained = self._samples()
        chance = CRITICAL * math.sqrt(1 / len(generated) + 1 / len(trained))
        before, self._warned = self._warned, distance > max(TOLERANCE, chance)
        if before or not self._warned:
            return None
        means = [sum(lengths) / len(lengths) for lengths in (trained, generated)]
        return (
            f"trained answers are not like the generated ones: mean length {means[0]:.1f} against {means[1]:.1f} "
            f"(Kolmogorov-Smirnov distance {distance:.2f}); something drops or filters by length"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"a metric cannot be a {type(value).__name__}")
