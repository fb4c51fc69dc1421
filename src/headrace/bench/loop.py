"""`headrace bench loop`: compares synchronous and asynchronous runs of one workload with a tiny model.

Every run is real: engine and trainer are processes of their own, and weights are delivered and proved at every version.
Rates count *consumed* tokens, which are those that reached a loss.

By default every process has one compute thread, and rates are over the whole time of training. This includes the
beginning, when the buffer fills, and the end, when it empties. The workload is first balanced, so that generating and
training a version take about the same time, because asynchrony can gain most there. The figures say how close the
balance was.

With `--long-tail`, answers have very different lengths. Synchronous and asynchronous runs take turns, so that other
work on the machine slows both down alike.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from headrace.bench.options import LoopBench
from headrace.bench.report import Say
from headrace.bench.workload import WARM_VERSIONS, measure_run, run_config, tiny_config, write_model
from headrace.config import Config
from headrace.errors import UserError
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

VERSIONS = 30
ANSWER = 32
FIRST_PROMPT = 96
SHORTEST_PROMPT, LONGEST_PROMPT = 4, 512
CALIBRATION_VERSIONS = 6
ATTEMPTS = 3
TARGET = 1.08
"""The wanted ratio of training time to generation time. It is above 1, so that the trainer does not have to wait."""
TAIL_VERSIONS = 25
TAIL_PROMPT, TAIL_LONGEST = 8, 400
TAIL_GROUPS, TAIL_GROUP_SIZE = 16, 2
DEPTHS = (0, 2)
LEAST_TAIL_VERSIONS = WARM_VERSIONS + max(DEPTHS) + 1


def bench_loop(options: LoopBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    if options.model:
        # Imported late, because it loads torch.
        from headrace.bench.loop_model import bench_model

        return bench_model(options, say)
    if options.long_tail and 0 < options.versions < LEAST_TAIL_VERSIONS:
        raise UserError(f"--versions {options.versions}: at least {LEAST_TAIL_VERSIONS} with --long-tail")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        write_model(Path(scratch) / "model")
        if options.long_tail:
            return _long_tail(Path(scratch), options.versions or TAIL_VERSIONS, options.rounds, say)
        return _balanced(Path(scratch), options.versions or VERSIONS, say)


def _balanced(directory: Path, versions: int, say: Say) -> dict[str, Any]:
    prompt = _balance(directory, say)

    def measure(name: str, depth: int, threads: int) -> dict[str, Any]:
        say(f"{name}: {versions} versions, depth {depth}, {threads} thread(s) a process")
        return _measure(directory, name, prompt=prompt, versions=versions, depth=depth, threads=threads)

    synchronous = measure("depth-0", 0, 1)
    asynchronous = measure("depth-2", 2, 1)
    two_threads = measure("depth-0-two-threads", 0, 2)
    return {
        "versions": versions,
        "prompt_tokens": prompt,
        "answer_tokens": ANSWER,
        "training_over_generation": synchronous["training_seconds"] / synchronous["generation_seconds"],
        "depth_0": synchronous,
        "depth_2": asynchronous,
        "depth_0_two_threads": two_threads,
        "ratio": asynchronous["tokens_per_second"] / synchronous["tokens_per_second"],
        "ratio_to_two_threads": asynchronous["tokens_per_second"] / two_threads["tokens_per_second"],
    }


def _balance(directory: Path, say: Say) -> int:
    """Return a prompt length at which training takes about `TARGET` times as long as generation.

    Generation computes a prompt once for each group, and training once for each answer. So a longer prompt gives the
    trainer more work than the engine. Both times are close to linear in the length of the prompt.
    """
    points: list[tuple[int, float, float]] = []
    prompt = FIRST_PROMPT
    for attempt in range(ATTEMPTS):
        say(f"balancing, try {attempt + 1}: prompts of {prompt} tokens")
        name = f"balance-{attempt}"
        found = _measure(directory, name, prompt=prompt, versions=CALIBRATION_VERSIONS, depth=0, threads=1)
        points.append((prompt, found["generation_seconds"], found["training_seconds"]))
        if abs(found["training_seconds"] / found["generation_seconds"] / TARGET - 1) < 0.05:
            break
        prompt = _next_prompt(points)
    return prompt


def _next_prompt(points: list[tuple[int, float, float]]) -> int:
    """Return the prompt length to try next.

    The excess of a try is its training time minus `TARGET` times its generation time. The next length is where the line
    through the last two excesses crosses zero. After the first try, it is a proportional guess.
    """
    excess = [(prompt, training - TARGET * generation) for prompt, generation, training in points]
    if len(excess) == 1:
        prompt, generation, training = points[0]
        guess = (prompt + ANSWER) * TARGET * generation / training - ANSWER
    else:
        (x0, y0), (x1, y1) = excess[-2:]
        guess = x1 if x0 == x1 or y0 == y1 else x1 - y1 * (x1 - x0) / (y1 - y0)
    return min(max(round(guess), SHORTEST_PROMPT), LONGEST_PROMPT)


def _measure(directory: Path, name: str, *, prompt: int, versions: int, depth: int, threads: int) -> dict[str, Any]:
    config = tiny_config(directory, name, prompt=prompt, answer=ANSWER, versions=versions, depth=depth, threads=threads)
    summary = start_run(config, NoProgress()).summary
    seconds = summary["train_seconds"]
    names = ("tokens_per_second", "tokens_trained", "trainer_idle_fraction", "engine_idle_fraction", "lag_mean")
    return {name: summary[name] for name in (*names, "lag_max")} | {
        "seconds": seconds,
        "generation_seconds": seconds * (1 - summary["engine_idle_fraction"]),
        "training_seconds": seconds * (1 - summary["trainer_idle_fraction"]),
    }


def _long_tail(directory: Path, versions: int, rounds: int, say: Say) -> dict[str, Any]:
    """Measure each depth `rounds` times and return all figures. `say` gets a line after each run."""
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in DEPTHS}
    for number in range(rounds):
        for depth in DEPTHS if number % 2 == 0 else reversed(DEPTHS):
            config = _tail_config(directory, f"depth-{depth}-{number}", versions, depth)
            found, _ = measure_run(config, depth, WARM_VERSIONS)
            runs[depth].append(found)
            say(f"depth {depth}: {found['tokens_per_second']:.0f} tokens/s over {found['seconds']:.1f} s")
    slow, fast = (
        sum(run["tokens"] for run in runs[depth]) / sum(run["seconds"] for run in runs[depth]) for depth in DEPTHS
    )
    return {
        "versions": versions,
        "rounds": rounds,
        "tokens_per_second": {f"depth_{DEPTHS[0]}": slow, f"depth_{DEPTHS[1]}": fast},
        "ratio": fast / slow,
        "ratios": [b["tokens_per_second"] / a["tokens_per_second"] for a, b in zip(*runs.values(), strict=True)],
        "runs": {f"depth_{depth}": runs[depth] for depth in DEPTHS},
    }


def _tail_config(directory: Path, name: str, versions: int, depth: int) -> Config:
    """Return the configuration of one run. At every depth, the engine has slots for all answers of the deepest run."""
    return run_config(
        directory,
        name,
        versions=versions,
        depth=depth,
        prompt=TAIL_PROMPT,
        lengths=f"long-tail:{TAIL_LONGEST}",
        groups=TAIL_GROUPS,
        group_size=TAIL_GROUP_SIZE,
        engine={"slots": (max(DEPTHS) + 1) * TAIL_GROUPS * TAIL_GROUP_SIZE, "device": "cpu"},
        training={"device": "cpu"},
    )
