"""Runs every `headrace bench` of docs/performance.md and docs/delivery.md that needs a GPU, and checks its goals.

    python benchmarks/gpu_figures.py runs/figures                   # all, one after the other: about 25 minutes
    python benchmarks/gpu_figures.py runs/figures engine-1024 loop  # engine-1024, and all whose names begin with loop
    python benchmarks/gpu_figures.py --list

The figures of a benchmark are written to DIRECTORY/NAME.json, and its messages to DIRECTORY/NAME.log. The exit code is
1 if a benchmark fails, or if a figure does not reach its goal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""The figures of one benchmark. Under the key `BESIDE` are the figures of all benchmarks in the same directory, by
name."""
BESIDE = "beside"
Bound = float | Callable[[Figures], float]


@dataclass(frozen=True)
class Goal:
    """A figure, and the least or the most that it may be. A figure without a bound is only printed."""

    name: str
    value: Callable[[Figures], float]
    least: Bound | None = None
    most: Bound | None = None

    def check(self, figures: Figures) -> tuple[bool, str]:
        """Return whether the goal is reached, and a line that says so."""
        value = float(self.value(figures))
        least, most = (bound(figures) if callable(bound) else bound for bound in (self.least, self.most))
        reached = (least is None or value >= least) and (most is None or value <= most)
        bounds = [f"at least {_number(least)}"] if least is not None else []
        bounds += [f"at most {_number(most)}"] if most is not None else []
        said = f"  ({', '.join(bounds)}{'' if reached else ': MISSED'})" if bounds else ""
        return reached, f"{self.name} {_number(value)}{said}"


@dataclass(frozen=True)
class Benchmark:
    """A command, and the goals of its figures."""

    name: str
    command: str
    """The arguments of `headrace bench`."""
    goals: Sequence[Goal]
    seconds: float = 300.0
    """The time limit of the command."""


def _rate(least: Bound) -> Goal:
    return Goal("tokens/s", lambda f: f["tokens_per_second"], least)


def _loop(least: float) -> list[Goal]:
    return [
        Goal("asynchronous tokens/s", lambda f: f["asynchronous"]["tokens_per_second"], least),
        Goal("synchronous tokens/s", lambda f: f["synchronous"]["tokens_per_second"]),
        Goal("of the bound", lambda f: f["of_the_bound"], 0.9),
    ]


def _stall_limit(figures: Figures) -> float:
    return 1e3 * float(figures["swaps"]["stall_limit_seconds"])


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
        [_rate(lambda f: 0.75 * f[BESIDE].get("engine-0.6b-256", {"tokens_per_second": 45e3})["tokens_per_second"])],
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
            Goal("stall, ms", lambda f: 1e3 * f["swaps"]["stall_seconds_mean"], most=_stall_limit),
            Goal("longest stall, ms", lambda f: 1e3 * f["swaps"]["stall_seconds_max"], most=_stall_limit),
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
            Goal("nccl, ms", lambda f: 1e3 * f["rows"][1]["acknowledged_seconds"]["median"]),
            Goal("nccl by parameter, ms", lambda f: 1e3 * f["rows"][2]["acknowledged_seconds"]["median"]),
        ],
    ),
)


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure every figure that needs a GPU.")
    parser.add_argument("directory", type=Path, nargs="?", help="where figures and logs are left")
    parser.add_argument("names", nargs="*", help="names or beginnings of names; all if there are none")
    parser.add_argument("--list", action="store_true", help="say the names and commands, and end")
    given = parser.parse_args()
    chosen = choose(given.names)
    if given.list:
        for benchmark in chosen:
            print(f"{benchmark.name}: headrace bench {benchmark.command}")
        return
    if given.directory is None:
        raise SystemExit("gpu_figures.py: say where figures are to be left (or --list)")
    given.directory.mkdir(parents=True, exist_ok=True)
    reached = [measure(benchmark, given.directory) for benchmark in chosen]
    raise SystemExit(0 if all(reached) else 1)


def choose(names: Sequence[str]) -> list[Benchmark]:
    """Return the benchmarks with these names; all if there are no names.

    A name that no benchmark has stands for all benchmarks whose names begin with it.
    """
    known = [benchmark.name for benchmark in BENCHMARKS]
    chosen: set[str] = set()
    for name in names:
        found = [name] if name in known else [each for each in known if each.startswith(name)]
        if not found:
            raise SystemExit(f"gpu_figures.py: no benchmark begins with {name} (there are {', '.join(known)})")
        chosen.update(found)
    return [benchmark for benchmark in BENCHMARKS if not names or benchmark.name in chosen]


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
        # Other benchmarks compare themselves with this file, so an incomplete file must not stay.
        figures.unlink()
        print(f"    FAILED: {failure} (see {directory / benchmark.name}.log)", flush=True)
        return False
    return judge(benchmark, json.loads(figures.read_text()) | {BESIDE: read_all(directory)})


def read_all(directory: Path) -> dict[str, Figures]:
    """Return the figures of all benchmarks that were measured in this directory and did not fail."""
    files = {b.name: directory / f"{b.name}.json" for b in BENCHMARKS}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def judge(benchmark: Benchmark, figures: Figures) -> bool:
    """Print the figure of every goal. Return whether all goals are reached."""
    checked = [goal.check(figures) for goal in benchmark.goals]
    for _, line in checked:
        print(f"    {line}", flush=True)
    return all(reached for reached, _ in checked)


def _number(value: float | None) -> str:
    assert value is not None
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
