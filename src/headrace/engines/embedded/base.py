"""The runner protocol: a runner turns a plan into tokens, on the host or on a GPU.

A runner may be late: the tokens that it returns may come from plans of earlier steps. The defaults of the methods are
those of a runner that computes each plan at once.
"""

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from headrace.engines.embedded.scheduler import StepPlan
from headrace.engines.embedded.sequence import Sampled, Sequence
from headrace.engines.embedded.transfer import Arriving
from headrace.types import Float32Array, Int32Array

Haste = Literal["none", "soon", "now"]
"""How urgent a swap of weights is. `soon`: new weights have arrived and are being checked. `now`: they are checked and
wait to be installed."""


@dataclass
class Timings:
    """How the time of decode steps was spent."""

    steps: int = 0
    host_seconds: float = 0.0
    """The time that the host spent on passes: computing or launching them, and reading their tokens."""
    device_seconds: float = 0.0
    """The time that the device spent on passes; 0 where the host itself computes."""
    longest_gap_seconds: float = 0.0
    """The longest time that the device was idle between two launches."""

    def reset(self) -> None:
        """Set all timings to zero."""
        self.steps, self.host_seconds, self.device_seconds, self.longest_gap_seconds = 0, 0.0, 0.0, 0.0


class Runner(Protocol):
    """A runner of one model. All calls come from one thread, inside of `active()`, except `hurry`."""

    prefill_chunk: int
    """The number of prompt tokens that the runner prefers to compute in one pass."""
    gather: int
    """The argument `gather` of `Scheduler`."""
    overlaps: bool
    """Whether the host continues while the work that it launched is computed."""
    timings: Timings

    @property
    def ahead(self) -> int:
        """The number of tokens that a plan's blocks must cover beyond the known tokens and those in flight."""
        return 1

    def active(self) -> AbstractContextManager[Any]:
        """Return the context in which this runner's work, and the copying of weights, takes place."""
        return nullcontext()

    def hurry(self, haste: Haste) -> None:
        """Prepare for a swap of weights: keep as little work in flight as possible, and with `now` wait for none of it.

        This method may be called from any thread.
        """
        return

    @property
    def holds(self) -> bool:
        """Whether the caller must begin nothing now, and call `collect` instead of `run`.

        This is so until the work in flight has ended or new weights are here.
        """
        return False

    @property
    def busy(self) -> bool:
        """Whether work is in flight, so that `drain` would return something."""
        return False

    def run(self, plan: StepPlan, version: int) -> list[Sampled]:
        """Begin the plan under the live weights of this version. Return the tokens that are known by now."""

    def collect(self) -> list[Sampled]:
        """Return the tokens of the oldest work in flight and all others that are known by now.

        Return none if something else, such as new weights, comes first.
        """
        return []

    def drain(self) -> list[Sampled]:
        """Wait for all work in flight, and return its tokens."""
        return []

    def release(self, sequence: Sequence) -> None:
        """Free what the runner holds for a sequence that is no longer running. Idempotent."""
        return

    def installed(self, version: int) -> None:
        """Record that the live weights have this version from now on."""
        return

    def clear(self, blocks: Seq[int]) -> None:
        """Make these blocks safe to reuse, because they may hold numbers that are not finite."""

    def score(self, token_ids: Int32Array, *, again: bool = False) -> Arriving:
        """Begin to score tokens 1..n given their prefix, untempered, without the cache.

        With `again`, sequences of this length will be scored often, so the runner may prepare to score them faster.
        """

    def score_likeliest(self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int) -> Arriving:
        """Begin to score tokens 1..n given their prefix, at their temperatures, with the likeliest tokens there.

        The numbers are those of `likeliest.read_likeliest`.
        """
