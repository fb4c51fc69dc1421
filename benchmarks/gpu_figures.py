"""Runs every `headrace bench` of docs/performance.md and docs/delivery.md that needs a GPU, and checks its goals.

    python benchmarks/gpu_figures.py runs/figures                   # all, one after the other: about 25 minutes
    python benchmarks/gpu_figures.py runs/figures engine-1024 loop  # engine-1024, and all whose names begin with loop

The figures of a benchmark are written to DIRECTORY/NAME.json, and its messages to DIRECTORY/NAME.log. The exit code is
1 if a benchmark fails, or if a figure does not reach its goal.
"""

import argparse
import json
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from typing import Any

SECONDS = 420.0
"""The time limit of a command."""
ASYNCHRONOUS = "asynchronous.tokens_per_second"
TO_FIRST_TOKEN = "load_seconds + start_seconds"
Goals = dict[str, tuple[float, float]]
"""The least and the most that figures may be. Dots separate nested names, and figures may be added."""
BENCHMARKS: dict[str, tuple[str, Goals]] = {
    "engine-256": ("engine smollm2-135m --batch 256", {"tokens_per_second": (100e3, inf)}),
    "engine-1024": ("engine smollm2-135m --batch 1024", {"tokens_per_second": (200e3, inf)}),
    "engine-0.6b-256": (
        "engine qwen3-0.6b --batch 256",
        {"tokens_per_second": (45e3, inf), TO_FIRST_TOKEN: (0, 60)},
    ),
    "engine-0.6b-top-p": ("engine qwen3-0.6b --batch 256 --top-p 0.95", {"tokens_per_second": (40e3, inf)}),
    "engine-0.6b-1024": ("engine qwen3-0.6b --batch 1024", {"tokens_per_second": (55e3, inf)}),
    "engine-4b-tail": (
        "engine qwen3-4b --batch 256 --tail 8:8192",
        {"before_tail.fraction_of_ceiling": (0.45, inf), "tail.fraction_of_ceiling": (0.5, inf)},
    ),
    "engine-swaps": (
        "engine qwen3-0.6b --batch 256 --generate 1024 --swap-every 1",
        {
            "swaps.stall_over_limit": (0, 1),
            "swaps.interval_seconds": (0, 1.1),
            "swaps.loss": (-inf, 0.03),
            "swaps.mis_tagged": (0, 0),
        },
    ),
    "engine-fork": (
        "engine qwen3-0.6b --batch 16 --generate 64 --no-compile --fork 8:2000 --dtype float32 --top-k 20",
        {TO_FIRST_TOKEN: (0, 15), "fork.prefilled_tokens": (0, 0), "fork.equal": (8, 8)},
    ),
    "train-0.6b": ("train qwen3-0.6b --tokens 65536 --sequence 4096", {"mfu": (0.28, 1)}),
    "train-1.7b": ("train qwen3-1.7b --tokens 65536 --sequence 4096", {"mfu": (0.38, 1)}),
    "train-packed": (
        "train qwen3-0.6b --lengths lognormal:256:2048 --compare",
        {"variants.without packing.slower": (2, inf)},
    ),
    "loop-equal": (
        "loop qwen3-0.6b --in-flight 256 --lengths equal:512",
        {ASYNCHRONOUS: (25e3, inf), "of_the_bound": (0.9, inf)},
    ),
    # A version takes two seconds, except for some that wait for a late answer. With only six versions, one such version
    # would count too much.
    "loop-equal-135m": (
        "loop smollm2-135m --in-flight 256 --lengths equal:512 --versions 12",
        {ASYNCHRONOUS: (40e3, inf), "of_the_bound": (0.9, inf)},
    ),
    "loop-lognormal": (
        "loop qwen3-0.6b --in-flight 256 --lengths lognormal:256:2048",
        {"ratio": (1.5, inf), "of_the_bound": (0.9, inf)},
    ),
    "delivery-legs": (
        "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --versions 16 --decode 256 --changed 0",
        {"rows.0.first_token_beyond_a_step_seconds": (0, 0.015), "proof.full.digest_seconds": (0, 0.002)},
    ),
    "delivery-nccl": (
        "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --transport nccl --per-parameter"
        " --versions 5",
        {"rows.1.acknowledged_seconds": (0, inf), "rows.2.acknowledged_seconds": (0, inf)},
    ),
}
"""The name of a benchmark -> the arguments of `headrace bench`, and the goals of its figures."""


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure every figure that needs a GPU.")
    parser.add_argument("directory", type=Path, help="where figures and logs are left")
    parser.add_argument("names", nargs="*", help=f"names or beginnings of names; all if none: {', '.join(BENCHMARKS)}")
    given = parser.parse_args()
    chosen = choose(given.names)
    given.directory.mkdir(parents=True, exist_ok=True)
    reached = [measure(name, *BENCHMARKS[name], given.directory) for name in chosen]
    raise SystemExit(0 if all(reached) else 1)


def choose(names: list[str]) -> list[str]:
    """Return the names of the benchmarks to run; all if `names` is empty.

    A name that no benchmark has stands for all benchmarks whose names begin with it.
    """
    chosen: set[str] = set()
    for name in names:
        found = [name] if name in BENCHMARKS else [each for each in BENCHMARKS if each.startswith(name)]
        if not found:
            raise SystemExit(f"gpu_figures.py: no benchmark begins with {name} (there are {', '.join(BENCHMARKS)})")
        chosen.update(found)
    return [name for name in BENCHMARKS if not names or name in chosen]


def measure(name: str, command: str, goals: Goals, directory: Path, seconds: float = SECONDS) -> bool:
    """Run one benchmark and print its figures. Return whether it ran and reached its goals."""
    figures = directory / f"{name}.json"
    started = time.monotonic()
    with figures.open("w") as out, (directory / f"{name}.log").open("w") as log:
        try:
            whole = [sys.executable, "-m", "headrace", "bench", *command.split(), "--json"]
            code = subprocess.run(whole, stdout=out, stderr=log, timeout=seconds).returncode
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {seconds:g} s"
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if failure:
        print(f"    FAILED: {failure} (see {directory / name}.log)", flush=True)
        return False
    return judge(goals, json.loads(figures.read_text()))


def judge(goals: Goals, figures: dict[str, Any]) -> bool:
    """Print each figure with its goal. Return whether all goals are reached."""
    missed = 0
    for path, (least, most) in goals.items():
        value = sum(_figure(figures, part) for part in path.split(" + "))
        reached = least <= value <= most
        missed += not reached
        print(f"    {path} {value:,.6g}  ({least:g} to {most:g}{'' if reached else ': MISSED'})", flush=True)
    return not missed


def _figure(figures: dict[str, Any], path: str) -> float:
    found: Any = figures
    for step in path.split("."):
        found = found[int(step) if step.isdigit() else step]
    return float(found)


if __name__ == "__main__":
    main()
