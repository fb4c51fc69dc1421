"""The log `metrics.jsonl`, append-only with one JSON object per line, and the drift of lengths.

A record is given to the operating system as soon as it is written, so a killed process loses no earlier record. There
is no fsync, so a power failure may lose the last records. A process that is killed during a write may leave half a
line. The next writer ends that line, and the reader skips it.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.observe.curves import rewards_of
from headrace.observe.prometheus import Gauges
from headrace.observe.trackers.feed import Trackers
from headrace.types import Group, without_republished

MEMORY = 2048
"""The number of latest generated rollouts that are compared with the trained ones among them."""
FEWEST = 256
"""With fewer rollouts than this of either kind, nothing is reported."""
TOLERANCE = 0.1
CRITICAL = 1.95
"""This factor times sqrt(1/n + 1/m) is a distance that equal distributions exceed once in a thousand times."""


class MetricsLog:
    """A log that appends records `{"time": seconds since 1970, "kind": ..., ...}`. Only one thread may use it."""

    def __init__(
        self,
        path: Path,
        *,
        trackers: Trackers | None = None,
        gauges: Gauges | None = None,
        listener: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Open the log. Each record goes to trackers, gauges and `listener` too.

        The trackers are closed with the file.
        """
        self._trackers = trackers
        self._gauges = gauges
        self._listener = listener
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
        if self._gauges is not None:
            self._gauges.log(msgspec.json.decode(line))
        if self._listener is not None:
            self._listener(msgspec.json.decode(line))

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
