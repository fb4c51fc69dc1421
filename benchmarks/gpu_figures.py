"""Runs every `headrace bench` of docs/performance.md and docs/delivery.md that needs a GPU, and checks its goals.

    python benchmarks/gpu_figures.py runs/figures         # all, one after the other: about 25 minutes
    python benchmarks/gpu_figures.py runs/figures engine  # those whose commands begin with this

The figures of a command are written to a file DIRECTORY/*.json that is named after it, and its messages to *.log. The
exit code is 1 if a command fails, or if a figure does not reach its goal.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from functools import reduce
from math import inf
from pathlib import Path
from typing import Any

SECONDS = 420.0
"""The time limit of a command."""
ASYNCHRONOUS = "asynchronous.tokens_per_second"
BENCHMARKS: dict[str, dict[str, tuple[float, float]]] = {
    "engine smollm2-135m --batch 256": {"tokens_per_second": (100e3, inf)},
    "engine smollm2-135m --batch 1024": {"tokens_per_second": (200e3, inf)},
    "engine qwen3-0.6b --batch 256": {"tokens_per_second": (45e3, inf), "start_seconds": (0, 60)},
    "engine qwen3-0.6b --batch 256 --top-p 0.95": {"tokens_per_second": (40e3, inf)},
    "engine qwen3-0.6b --batch 1024": {"tokens_per_second": (55e3, inf)},
    "engine qwen3-4b --batch 256 --tail 8:8192": {
        "before_tail.fraction_of_ceiling": (0.45, inf),
        "tail.fraction_of_ceiling": (0.5, inf),
    },
    "engine qwen3-0.6b --batch 256 --generate 1024 --swap-every 1": {
        "swaps.stall_over_limit": (0, 1),
        "swaps.interval_seconds": (0, 1.1),
        "swaps.loss": (-inf, 0.03),
        "swaps.mis_tagged": (0, 0),
    },
    "engine qwen3-0.6b --batch 16 --generate 64 --no-compile --fork 8:2000 --dtype float32 --top-k 20": {
        "start_seconds": (0, 15),
        "fork.prefilled_tokens": (0, 0),
        "fork.equal": (8, 8),
    },
    "train qwen3-0.6b --tokens 65536 --sequence 4096": {"mfu": (0.28, 1)},
    "train qwen3-1.7b --tokens 65536 --sequence 4096": {"mfu": (0.38, 1)},
    "train qwen3-0.6b --lengths lognormal:256:2048 --compare": {"variants.without packing.slower": (2, inf)},
    "loop qwen3-0.6b --in-flight 256 --lengths equal:512": {ASYNCHRONOUS: (25e3, inf), "of_the_bound": (0.9, inf)},
    # A version takes two seconds, except for some that wait for a late answer. With only six versions, one such version
    # would count too much.
    "loop smollm2-135m --in-flight 256 --lengths equal:512 --versions 12": {
        ASYNCHRONOUS: (40e3, inf),
        "of_the_bound": (0.9, inf),
    },
    "loop qwen3-0.6b --in-flight 256 --lengths lognormal:256:2048": {"ratio": (1.5, inf), "of_the_bound": (0.9, inf)},
    "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --versions 16 --decode 256 --changed 0": {
        "rows.0.first_token_beyond_a_step_seconds": (0, 0.015),
        "proof.full.digest_seconds": (0, 0.002),
    },
    "delivery --model-shape qwen3-0.6b --device cuda --transport cuda_ipc --transport nccl --per-parameter"
    " --versions 5": {"rows.1.acknowledged_seconds": (0, inf), "rows.2.acknowledged_seconds": (0, inf)},
}
"""The arguments of `headrace bench` -> the least and the most that its figures may be. Dots separate nested names."""


def main() -> None:
    """Run the benchmarks that were asked for."""
    parser = argparse.ArgumentParser(description="Measure every figure that needs a GPU.")
    parser.add_argument("directory", type=Path, help="where figures and logs are left")
    parser.add_argument("commands", nargs="*", default=[""], help="beginnings of commands; all if there are none")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    chosen = [command for command in BENCHMARKS if command.startswith(tuple(given.commands))]
    reached = [measure(command, BENCHMARKS[command], given.directory) for command in chosen]
    raise SystemExit(0 if reached and all(reached) else 1)


def measure(command: str, goals: dict[str, tuple[float, float]], directory: Path, seconds: float = SECONDS) -> bool:
    """Run one benchmark and print its figures. Return whether it ran and reached its goals."""
    name = re.sub(r"[^\w.]+", "-", command)
    figures = directory / f"{name}.json"
    started = time.monotonic()
    with figures.open("w") as out, (directory / f"{name}.log").open("w") as log:
        try:
            whole = [sys.executable, "-m", "headrace", "bench", *command.split(), "--json"]
            code = subprocess.run(whole, stdout=out, stderr=log, timeout=seconds).returncode
            failure = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            failure = f"not done within {seconds:g} s"
    print(f"{command}: {time.monotonic() - started:.0f} s", flush=True)
    if failure:
        print(f"    FAILED: {failure} (see {directory / name}.log)", flush=True)
        return False
    return judge(goals, json.loads(figures.read_text()))


def judge(goals: dict[str, tuple[float, float]], figures: dict[str, Any]) -> bool:
    """Print each figure with its goal. Return whether all goals are reached."""
    missed = 0
    for path, (least, most) in goals.items():
        steps = [int(step) if step.isdigit() else step for step in path.split(".")]
        value: Any = reduce(lambda part, step: part[step], steps, figures)
        reached = least <= value <= most
        missed += not reached
        print(f"    {path} {value:,.6g}  ({least:g} to {most:g}{'' if reached else ': MISSED'})", flush=True)
    return not missed


if __name__ == "__main__":
    main()
