"""`headrace bench loop --long-tail`: compares synchronous and asynchronous runs with answers of very different lengths.

The lengths are those of the study on a virtual clock (`sim.long_tail`): lognormal, and one answer in ten is ten times
longer. The runs are real, with real processes. Synchronous and asynchronous runs take turns, so that other work on the
machine slows both down alike.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.bench.shared_work import WARM_VERSIONS, steady_rate
from headrace.bench.workload import DRAWN, LengthsTask, write_model
from headrace.buffer.reader import open_readonly
from headrace.config import Config, make_config
from headrace.errors import UserError
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.sim.long_tail import LONG_FACTOR, LONG_SHARE, MEDIAN, SIGMA

PROMPT, LONGEST = 8, 400
GROUPS, GROUP_SIZE = 16, 2
DEPTHS = (0, 2)
VERSIONS = 25
LEAST_VERSIONS = WARM_VERSIONS + max(DEPTHS) + 1


class LongTailTask(LengthsTask):
    """A task whose answers have the lengths of the study, cut at `LONGEST`."""

    def __init__(self, length: int, seed: int, heldout: int) -> None:
        super().__init__(length, "equal:1", seed, heldout)
        rng = np.random.default_rng(seed)
        factors = np.where(rng.random(DRAWN) < LONG_SHARE, LONG_FACTOR, 1)
        drawn = factors * MEDIAN * np.exp(SIGMA * rng.standard_normal(DRAWN))
        self._lengths = itertools.cycle(np.clip(drawn.round(), 1, LONGEST).astype(int).tolist())


def check_options(model: str, versions: int) -> None:
    """Raise a one-line `UserError` for an option that makes no sense. 0 versions stands for the default."""
    if model:
        raise UserError(f"--long-tail: measures a tiny model of its own (remove {model})")
    if versions and versions < LEAST_VERSIONS:
        raise UserError(f"--versions {versions}: at least {LEAST_VERSIONS} with --long-tail")


def bench_long_tail(versions: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure each depth `rounds` times and return all figures. `say` gets a line after each run."""
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in DEPTHS}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        write_model(directory / "model")
        for number in range(rounds):
            for depth in DEPTHS if number % 2 == 0 else reversed(DEPTHS):
                found = _measure(directory, f"depth-{depth}-{number}", versions, depth)
                runs[depth].append(found)
                say(f"depth {depth}: {found['tokens_per_second']:.0f} tokens/s over {found['seconds']:.1f} s")
    rates = {
        depth: sum(run["tokens"] for run in runs[depth]) / sum(run["seconds"] for run in runs[depth])
        for depth in DEPTHS
    }
    return {
        "versions": versions,
        "rounds": rounds,
        "tokens_per_second": {f"depth_{depth}": rate for depth, rate in rates.items()},
        "ratio": rates[DEPTHS[-1]] / rates[DEPTHS[0]],
        "ratios": [
            fast["tokens_per_second"] / slow["tokens_per_second"]
            for slow, fast in zip(runs[DEPTHS[0]], runs[DEPTHS[-1]], strict=True)
        ],
        "runs": {f"depth_{depth}": runs[depth] for depth in DEPTHS},
    }


def _measure(directory: Path, name: str, versions: int, depth: int) -> dict[str, Any]:
    outcome = start_run(_config(directory, name, versions, depth), NoProgress())
    with open_readonly(outcome.run_dir.journal) as journal:
        steps = [msgspec.structs.asdict(step) for step in journal.steps()]
    names = ("trainer_idle_fraction", "engine_idle_fraction", "lag_mean", "lag_max")
    return steady_rate(steps, depth, WARM_VERSIONS) | {name: outcome.summary[name] for name in names}


def _config(directory: Path, name: str, versions: int, depth: int) -> Config:
    """Return the configuration of one run. At every depth, the engine has slots for all answers of the deepest run."""
    slots = (max(DEPTHS) + 1) * GROUPS * GROUP_SIZE
    return make_config(
        {
            "run": {"name": name, "directory": str(directory), "versions": versions},
            "model": {"path": str(directory / "model"), "weights": "random"},
            "task": {
                "kind": "environment",
                "factory": "headrace.bench.long_tail:LongTailTask",
                "config": {"length": PROMPT},
            },
            "engine": {"slots": slots, "max_length": PROMPT + LONGEST + 16, "kv": "keep", "device": "cpu"},
            "rollouts": {"group_size": GROUP_SIZE, "max_tokens": LONGEST},
            "buffer": {"groups": GROUPS, "depth": depth},
            "training": {"learning_rate": 1e-6, "device": "cpu"},
            "observe": {"display": "none", "keep_rollouts": False},
        }
    )


def lines(found: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    rows = [
        f"{key.replace('_', ' ')}  {rate:>8.0f} tokens/s   idle: trainer {_mean(runs, 'trainer_idle_fraction')}, "
        f"engine {_mean(runs, 'engine_idle_fraction')}   lag {_mean(runs, 'lag_mean')} "
        f"(max {max(run['lag_max'] for run in runs)})"
        for (key, rate), runs in zip(found["tokens_per_second"].items(), found["runs"].values(), strict=True)
    ]
    ratios = ", ".join(f"{ratio:.2f}" for ratio in found["ratios"])
    return [
        f"{found['rounds']} rounds of {found['versions']} versions, consumed tokens",
        *rows,
        f"depth 2 over depth 0: {found['ratio']:.2f}x (round by round: {ratios})",
    ]


def _mean(runs: list[dict[str, Any]], key: str) -> str:
    return f"{sum(run[key] for run in runs) / len(runs):.2f}"
