"""The log `metrics.jsonl`: append-only, one JSON object per line.

A record is given to the operating system as soon as it is written, so a killed process loses no earlier record. There
is no fsync, so a power failure may lose the last records. A process that is killed during a write may leave half a
line. The next writer ends that line, and the reader skips it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.observe.trackers import Trackers
from headrace.types import Group, without_republished


class MetricsLog:
    """A log that appends records `{"time": seconds since 1970, "kind": ..., ...}` to a file.

    It has no lock, so only one thread may use it.
    """

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


def describe_end(group: Group, outcome: str, version: int, republished: Sequence[int] = ()) -> dict[str, Any]:
    """Describe how a group ended, as a record: the length of its answers, the difficulty of its prompt, and its age.

    A version that was published again makes no group older.
    """
    usable = group.usable
    rewards = [rollout.reward for rollout in usable if rollout.reward is not None]
    oldest = [trace.oldest_version for rollout in usable for trace in rollout.traces if trace.trained.any()]

    def behind(older: int) -> int:
        return int(without_republished(version, republished) - without_republished(older, republished))

    return {
        "group": group.id,
        "outcome": outcome,
        "tokens": float(np.mean([rollout.sampled_tokens for rollout in usable])) if usable else None,
        "longest": max((rollout.sampled_tokens for rollout in usable), default=None),
        "reward": float(np.mean(rewards)) if rewards else None,
        "age": behind(group.version),
        "lag": behind(min(oldest)) if oldest else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"a metric cannot be a {type(value).__name__}")
