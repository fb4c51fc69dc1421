"""Runs every `headrace bench` of docs/performance.md and docs/delivery.md that needs a GPU, and checks its goals.

    python benchmarks/gpu_figures.py runs/figures                   # all, one after the other: about 25 minutes
    python benchmarks/gpu_figures.py runs/figures engine-1024 loop  # those whose names begin with one of these

The figures of a benchmark are written to DIRECTORY/NAME.json, and its messages to DIRECTORY/NAME.log. The exit code is
1 if a benchmark fails, or if a figure does not reach its goal.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Figures = dict[str, Any]


class Goal(NamedTuple):
    """A figure, and the least and the most that it may be."""

    name: str
    value: Callable[[Figures], float]
    least: float = -math.inf
    most: float = math.inf

    def check(self, figures: Figures) -> bool:
        """Print the figure with its goal. Return whether the goal is reached."""
        value = float(self.value(figures))
        reached = self.least <= value <= self.most
        bounds = [f"at least {self.least:,.6g}"] if self.least > -math.inf else []
        bounds += [f"at most {self.most:,.6g}"] if self.most < math.inf else []
        print(f"    {self.name} {value:,.6g}  {', '.join(bounds)}{'' if reached else ': MISSED'}", flush=True)
        return reached


class Benchmark(NamedTuple):
    """A command, and the goals of its figures."""

    name: str
    command: str
    """The arguments of `headrace bench`."""
    goals: Sequence[Goal]
    seconds: float = 300.0
    """The time limit of the command."""


def _rate(least: float) -> Goal:
    return Goal("tokens/s", lambda f: f["tokens_per_second"], least)


def _loop(least: float) -> list[Goal]:
    return [
        Goal("asynchronous tokens/s", lambda f: f["asynchronous"]["tokens_per_second"], least),
        Goal("of the bound", lambda f: f["of_the_bound"], 0.9),
    ]


def _stall(name: str) -> Goal:
    found = f"stall_seconds_{name}"
    return Goal(f"{name} stall over its limit", lambda f: f["swaps"][found] / f["swaps"]["stall_limit_seconds"], most=1)


BENCHMARKS = (
    Benchmark("engine-256", "engine smollm2-135m --batch 256", [_rate(100e3)]),
    Benchmark("engine-1024", "engine smollm2-135m --batch 1024", [_rate(200e3)]),
    Benchmark(
        "engine-0.6b-256",
        "engine qwen3-0.6b --batch 256",
        [_rate(45e3), Goal("seconds to the first token", lambda f: f["start_seconds"] + f["load_seconds"], most=60)],
    ),
    Benchmark(
        "engine-0.6b-top-p",
        "engine qwen3-0.6b --batch 256 --top-p 0.95",
        [_rate(40e3)],
    ),
    Benchmark("engine-0.6b-1024", "engine qwen3-0.6b --batch 1024", [_rate(55e3)]),
    Benchmark(
        "engine-4b-tail",
        "engine qwen3-4b --batch 256 --tail 8:8192",
        [
            Goal("of the ceiling before the tail", lambda f: f["before_tail"]["fraction_of_ceiling"], 0.45),
            Goal("of the ceiling in the tail", lambda f: f["tail"]["fraction_of_ceiling"], 0.5),
        ],
    ),
    Benchmark(
        "engine-swaps",
        "engine qwen3-0.6b --batch 256 --generate 1024 --swap-every 1",
        [
            _stall("mean"),
            _stall("max"),
            Goal("seconds between two swaps", lambda f: f["swaps"]["interval_seconds"], most=1.1),
            Goal("loss", lambda f: f["swaps"]["loss"], most=0.03),
            Goal("tokens with a wrong tag", lambda f: f["swaps"]["mis_tagged"], most=0),
        ],
    ),
    Benchmark(
        "engine-fork",
        "engine qwen3-0.6b --batch 16 --generate 64 --no-compile --fork 8:2000 --dtype float32 --top-k 20",
        [
            Goal("seconds to the first token", lambda f: f["start_seconds"] + f["load_seconds"], most=15),
            Goal("prompt tokens of the forks", lambda f: f["fork"]["prefilled_tokens"], most=0),
            Goal("equal continuations", lambda f: f["fork"]["equal"], 8),
        ],
    ),
    Benchmark("train-0.6b", "train qwen3-0.6b --tokens 65536 --sequence 4096", [Goal("MFU", lambda f: f["mfu"], 0.28)]),
    Benchmark("train-1.7b", "train qwen3-1.7b --tokens 65536 --sequence 4096", [Goal("MFU", lambda f: f["mfu"], 0.38)]),
    Benchmark(
        "train-packed",
        "train qwen3-0.6b --lengths lognormal:256:2048 --compare",
        [Goal("times as fast as padded", lambda f: f["variants"]["without packing"]["slower"], 2.0)],
    ),
    Benchmark("loop-equal", "loop qwen3-0.6b --in-flight 256 --lengths equal:512", _loop(25e3), 420),
    # A version takes two seconds, except for some that wait for a late answer. With only six versions, one such version
    # would count too much.
    Benchmark(
        "loop-equal-135m", "loop smollm2-135m --in-flight 256 --lengths equal:512 --versions 12", _loop(40e3), 420
    ),
    Benchmark(
        "loop-lognormal",
        "loop qwen3-0.6b --in-flight 256 --lengths lognormal:256:2048",
        [*_loop(0), Goal("times the synchronous run", lambda f: f["ratio"], 1.5)],
        420,
    ),
    Benchmark(
        "delivery-legs",
        "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --versions 16 --decode 256 --changed 0",
        [
            Goal(
                "first token beyond a step, ms",
                lambda f: 1e3 * f["rows"][0]["first_token_beyond_a_step_seconds"],
                most=15,
            ),
            Goal("digest, ms", lambda f: 1e3 * f["proof"]["full"]["digest_seconds"], most=2),
        ],
    ),
    Benchmark(
        "delivery-nccl",
        "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --transport nccl --per-parameter"
        " --versions 5",
        [
            Goal("nccl, ms", lambda f: 1e3 * f["rows"][1]["acknowledged_seconds"]),
            Goal("nccl by parameter, ms", lambda f: 1e3 * f["rows"][2]["acknowledged_seconds"]),
        ],
    ),
)


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure every figure that needs a GPU.")
    parser.add_argument("directory", type=Path, help="where figures and logs are left")
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names; all if there are none")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.name.startswith(tuple(given.names))]
    reached = [measure(benchmark, given.directory) for benchmark in chosen]
    raise SystemExit(0 if reached and all(reached) else 1)


def measure(benchmark: Benchmark, directory: Path) -> bool:
    """Run one benchmark and print its figures. Return whether it ran and reached its goals."""
    command = [sys.executable, "-m", "headrace", "bench", *benchmark.command.split(), "--json"]
    figures = directory / f"{benchmark.name}.json"
    started = time.monotonic()
    with figures.open("w") as out, (directory / f"{benchmark.name}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=out, stderr=log, timeout=benchmark.seconds).returncode
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {benchmark.seconds:g} s"
    print(f"{benchmark.name}: {time.monotonic() - started:.0f} s", flush=True)
    if failure:
        print(f"    FAILED: {failure} (see {directory / benchmark.name}.log)", flush=True)
        return False
    found = json.loads(figures.read_text())
    reached = [goal.check(found) for goal in benchmark.goals]
    return all(reached)


if __name__ == "__main__":
    main()
