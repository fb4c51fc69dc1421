"""The long-tail study: which rollouts a buffer leaves out, and what it costs to leave none out.

    python benchmarks/long_tail.py [--rollouts 20000] [--seed 0] [--svg docs/long_tail.svg]

It prints the table and draws the picture of docs/staleness.md. The real controller, window and rollouts run with the
fake engine under a virtual clock, so the numbers are the same on every machine. Answers have lognormal lengths, and one
in ten is ten times longer. The lengths of trained rollouts are compared with those of all generated rollouts, for the
window and for a queue that drops its oldest groups.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from learning_curve import standalone

from headrace.bench.workload import LONG_FACTOR, LONG_SHARE, MEDIAN, SIGMA
from headrace.buffer.reader import open_readonly
from headrace.buffer.window import Window
from headrace.config import make_config
from headrace.engines.base import Request
from headrace.observe.charts import Series
from headrace.observe.metrics import ks_distance
from headrace.sim.run import SimRun, run_virtual
from headrace.types import Batch, Group

TOKEN_SECONDS = 0.01
TRAIN_SECONDS = 0.002
"""Seconds per trained token. The trainer is the slower side unless it waits for the longest answer of a batch."""
GROUPS, GROUP_SIZE = 16, 2
KEPT_SHARE = 4
"""The queue trains less than one in this many groups, so fewer steps are enough for the same number of rollouts."""
POLICIES = ("depth 0", "depth 2", "drop oldest")


class DropOldest(Window):
    """The policy that the window is compared with.

    As many groups are in flight as the window has slots, whatever the trainer does. A queue holds finished groups for
    one batch; when it overflows, it drops the groups that started first.
    """

    @property
    def free(self) -> int:
        """The number of slots in which no group is generated."""
        return self.capacity - self.in_flight

    def stale(self) -> list[Group]:
        """Return the oldest groups that the queue has no room for."""
        return self.ready_groups()[: max(0, self.ready - self.groups)]

    def _next_batch(self) -> list[int] | None:
        ids = [group.id for group in self.ready_groups()[: self.groups]]
        return ids if len(ids) == self.groups else None


@dataclass(frozen=True)
class PolicyOutcome:
    """The results of one policy: lengths of rollouts, and trained tokens per second of virtual time."""

    generated: npt.NDArray[np.int64]
    trained: npt.NDArray[np.int64]
    distance: float
    """The Kolmogorov-Smirnov distance between the generated and the trained lengths."""
    tokens_per_second: float
    largest_lag: int
    dropped_groups: int


def long_tail(seed: int) -> Callable[[Request], int]:
    """Return a function that gives each request a length, which depends only on the request's own seed."""

    def length(request: Request) -> int:
        rng = np.random.default_rng([seed, request.sampling.seed])
        factor = LONG_FACTOR if rng.random() < LONG_SHARE else 1
        return max(1, round(factor * MEDIAN * float(np.exp(SIGMA * rng.standard_normal()))))

    return length


def study(policy: str, rollouts: int, seed: int = 0) -> PolicyOutcome:
    """Simulate one of `POLICIES` until about this many rollouts are generated."""
    versions = -(-(rollouts // KEPT_SHARE if policy == "drop oldest" else rollouts) // (GROUPS * GROUP_SIZE))
    config = make_config(
        {
            "run": {"versions": versions, "seed": seed},
            "model": {"path": "-"},
            "task": {"kind": "gym", "name": "-"},
            "engine": {"slots": 3 * GROUPS * GROUP_SIZE},
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": 1000},
            "buffer": {"groups": GROUPS, "depth": 0 if policy == "depth 0" else 2},
        }
    )
    window = DropOldest(GROUPS, 2, versions=None) if policy == "drop oldest" else None
    if window is not None:
        window.lag_bound = versions  # This policy has no lag bound.

    batches: list[Batch] = []

    async def simulate(path: Path) -> SimRun:
        run = SimRun(
            config,
            path,
            lengths=long_tail(seed),
            token_seconds=TOKEN_SECONDS,
            train_seconds=lambda batch: TRAIN_SECONDS * batch.trained_tokens,
            window=window,
        )
        run.trainer.on_batch = batches.append
        await run.execute()
        return run

    with tempfile.TemporaryDirectory() as directory:
        run = run_virtual(simulate(Path(directory)))
        with open_readonly(Path(directory) / "journal.db") as journal:
            ended = [record.sampled_tokens for record in journal.rollout_records("ending = 'finished'")]
    sampled = [np.add.reduceat(batch.versions >= 0, np.cumsum(batch.lengths) - batch.lengths) for batch in batches]
    generated, trained = np.asarray(ended, np.int64), np.concatenate(sampled).astype(np.int64)
    return PolicyOutcome(
        generated=generated,
        trained=trained,
        distance=ks_distance(generated, trained),
        tokens_per_second=sum(batch.trained_tokens for batch in batches) / run.seconds,
        largest_lag=max(int(batch.lags().max()) for batch in batches),
        dropped_groups=run.recorder.ledgers.as_dict()["groups"]["dropped"],
    )


def main() -> None:
    """Run the buffer policies one after the other, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args()
    outcomes = {}
    print("| policy | generated | trained | mean length, trained / generated | KS distance | tokens/s | largest lag |")
    print("|---|---|---|---|---|---|---|")
    for policy in POLICIES:
        found = outcomes[policy] = study(policy, given.rollouts, given.seed)
        print(
            f"| {policy} | {len(found.generated):,} | {len(found.trained):,} | "
            f"{found.trained.mean():.2f} / {found.generated.mean():.2f} | {found.distance:.3f} | "
            f"{found.tokens_per_second:.0f} | {found.largest_lag} |",
            flush=True,
        )
    faster = outcomes["depth 2"].tokens_per_second / outcomes["depth 0"].tokens_per_second
    print(f"\ndepth 2 consumes {faster:.2f} times the tokens of depth 0 in the same time")
    if given.svg is not None:
        given.svg.write_text(picture(outcomes))


def picture(outcomes: dict[str, PolicyOutcome]) -> str:
    """Draw the cumulative distributions of answer lengths over a logarithmic axis."""
    kept, queue = outcomes["depth 2"], outcomes["drop oldest"]
    grid = np.unique(np.geomspace(1, kept.generated.max(), 160).round())
    shown = {"generated": kept.generated, "trained, depth 2": kept.trained, "trained, drop oldest": queue.trained}
    lines = []
    for (name, lengths), tone in zip(shown.items(), "abd", strict=True):
        share = np.searchsorted(np.sort(lengths), grid, side="right") / len(lengths)
        points = list(zip(np.log2(grid).tolist(), share.tolist(), strict=True))
        lines.append(Series(label=name, points=points, tone=tone, hover=False))
    return standalone(
        {"Lengths of answers": lines}, "tokens of an answer (at most), as a power of 2", "share of answers"
    )


if __name__ == "__main__":
    main()
