"""The long-tail study: whom a buffer leaves out, and what it costs not to.

Answers have lognormal lengths, and one in ten is ten times longer. The lengths of what was trained are compared with
those of all that was generated, for the window and for a queue that drops its oldest groups.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.buffer.reader import open_readonly
from headrace.buffer.window import Window
from headrace.config import Config, make_config
from headrace.engines.base import Request
from headrace.observe.drift import ks_distance
from headrace.sim.clock import run_virtual
from headrace.sim.run import SimRun
from headrace.types import Group

MEDIAN, SIGMA = 4.0, 0.8
LONG_SHARE, LONG_FACTOR = 0.1, 10
TOKEN_SECONDS = 0.01
TRAIN_SECONDS = 0.002
"""A trained token: the trainer is the slower side, as long as nobody waits for the longest answer of a batch."""
GROUPS, GROUP_SIZE = 16, 2
KEPT_SHARE = 4
"""The queue trains less than one in so many groups: fewer steps are enough for as many rollouts."""
POLICIES = ("depth 0", "depth 2", "drop oldest")


class DropOldest(Window):
    """What the window is compared with: as many groups in flight as it has slots, whatever the trainer does, and a
    queue of finished ones for one batch that drops those that began first when it is over-full.
    """

    @property
    def free(self) -> int:
        """Slots that no group is generated in."""
        return self.capacity - self.in_flight

    def stale(self) -> list[Group]:
        """The oldest beyond what the queue holds."""
        return self.ready_groups()[: max(0, self.ready - self.groups)]

    def _next_batch(self) -> list[int] | None:
        ids = [group.id for group in self.ready_groups()[: self.groups]]
        return ids if len(ids) == self.groups else None


@dataclass(frozen=True)
class PolicyOutcome:
    """What one policy came to."""

    policy: str
    generated: npt.NDArray[np.int64]
    """Lengths of all rollouts that ended."""
    trained: npt.NDArray[np.int64]
    distance: float
    """Kolmogorov-Smirnov, between the two."""
    tokens_per_second: float
    """Consumed, in virtual time."""
    largest_lag: int
    dropped_groups: int


def long_tail(seed: int) -> Callable[[Request], int]:
    """Lengths, each a function of the request's own seed."""

    def length(request: Request) -> int:
        rng = np.random.default_rng([seed, request.sampling.seed])
        factor = LONG_FACTOR if rng.random() < LONG_SHARE else 1
        return max(1, round(factor * MEDIAN * float(np.exp(SIGMA * rng.standard_normal()))))

    return length


def study(policy: str, rollouts: int, seed: int = 0) -> PolicyOutcome:
    """Simulate one of `POLICIES` until so many rollouts are generated."""
    trained = rollouts // KEPT_SHARE if policy == "drop oldest" else rollouts
    config = _config("buffer.depth=0" if policy == "depth 0" else "buffer.depth=2", trained, seed)
    with tempfile.TemporaryDirectory() as directory:
        return run_virtual(_simulate(policy, config, Path(directory), seed))


async def _simulate(policy: str, config: Config, path: Path, seed: int) -> PolicyOutcome:
    window = DropOldest(GROUPS, 2, versions=None) if policy == "drop oldest" else None
    if window is not None:
        window.lag_bound = config.run.versions  # it has none
    run = SimRun(
        config,
        path,
        lengths=long_tail(seed),
        token_seconds=TOKEN_SECONDS,
        train_seconds=lambda batch: TRAIN_SECONDS * batch.trained_tokens,
        window=window,
    )
    await run.execute()
    with open_readonly(path / "journal.db") as journal:
        ended = [record.sampled_tokens for record in journal.rollout_records("ending = 'finished'")]
    generated, trained = np.asarray(ended, np.int64), np.asarray(run.trainer.lengths, np.int64)
    return PolicyOutcome(
        policy=policy,
        generated=generated,
        trained=trained,
        distance=ks_distance(generated, trained),
        tokens_per_second=run.trainer.trained_tokens / run.seconds,
        largest_lag=max(run.trainer.lags),
        dropped_groups=run.recorder.ledgers.as_dict()["groups"]["dropped"],
    )


def _config(depth: str, rollouts: int, seed: int) -> Config:
    raw: dict[str, Any] = {"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}
    versions = -(-rollouts // (GROUPS * GROUP_SIZE))
    settings: Sequence[str] = (
        depth,
        f"run.versions={versions}",
        f"run.seed={seed}",
        f"buffer.groups={GROUPS}",
        f"rollouts.group_size={GROUP_SIZE}",
        "rollouts.max_tokens=1000",
        f"engine.slots={3 * GROUPS * GROUP_SIZE}",
    )
    return make_config(raw, settings)
