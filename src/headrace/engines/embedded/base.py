"""The runner protocol: what turns a plan into tokens, on the host or on a GPU.

A runner may answer late: the tokens that it returns may come from plans of earlier steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.engines.embedded.scheduler import StepPlan
from headrace.engines.embedded.sequence import Sampled, Sequence
from headrace.types import Float32Array, Int32Array

Haste = Literal["none", "soon", "now"]
"""Whether something is about to wait for the end of what is under way, or waits already."""


@dataclass
class Timings:
    """Where the time of steps went."""

    steps: int = 0
    host_seconds: float = 0.0
    """The host was busy with passes: computing or launching them, reading what they drew."""
    device_seconds: float = 0.0
    """The device was busy with passes; 0 where host and device are one."""
    longest_gap_seconds: float = 0.0
    """The longest time that the device had between two launches."""

    def reset(self) -> None:
        """Count from here."""
        self.steps, self.host_seconds, self.device_seconds, self.longest_gap_seconds = 0, 0.0, 0.0, 0.0


class PendingScores(Protocol):
    """Log-probabilities that may still be under way."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> Float32Array:
        """The log-probabilities."""
        ...


class Runner(Protocol):
    """Runs one model. All calls come from one thread, under `active()`."""

    prefill_chunk: int
    """Prompt tokens that it likes to compute in one pass."""
    gather: int
    """See `Scheduler`."""
    overlaps: bool
    """Whether the host goes on while what it has begun is computed."""
    timings: Timings

    @property
    def ahead(self) -> int:
        """Tokens that a plan's blocks must cover beyond those known or under way."""
        ...

    def active(self) -> AbstractContextManager[Any]:
        """Where this runner's work, and the copying of weights, takes place."""
        ...

    def hurry(self, haste: Haste) -> None:
        """New weights are next: have as little under way as can be, and wait for none of it `now`. From any thread."""
        ...

    @property
    def holds(self) -> bool:
        """Whether nothing is to be begun before what is under way has ended, or weights are here: then `collect`."""
        ...

    @property
    def busy(self) -> bool:
        """Whether `drain` would return something."""
        ...

    def run(self, plan: StepPlan, version: int) -> list[Sampled]:
        """Begin the plan under the live weights of this version; tokens that are known by now."""
        ...

    def collect(self) -> list[Sampled]:
        """Tokens of the oldest that is under way, and all that are there; none if something else is next."""
        ...

    def drain(self) -> list[Sampled]:
        """All tokens that are still under way."""
        ...

    def release(self, sequence: Sequence) -> None:
        """This sequence has left the scheduler's running ones; idempotent."""
        ...

    def installed(self, version: int) -> None:
        """From here on the live weights are of this version."""
        ...

    def clear(self, blocks: Seq[int]) -> None:
        """What these blocks hold is not finite."""
        ...

    def score(self, token_ids: Int32Array, *, again: bool = False) -> PendingScores:
        """Begin to score tokens 1..n given their prefix, untempered, without the cache.

        With `again`, rows of this length will come again and again: what makes them quicker is worth preparing.
        """
        ...
