"""`headrace bench loop`: compares synchronous and asynchronous runs of one workload with a tiny model.

Every run is real: engine and trainer are processes of their own with one compute thread each, and weights are delivered
and proved at every version. Rates count *consumed* tokens, which are those that reached a loss, over the whole time of
training. This includes the beginning, when the buffer fills, and the end, when it empties. The workload is first
balanced, so that generating and training a version take about the same time, because asynchrony can gain most there.
The figures say how close the balance was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.bench.workload import loop_config, write_model
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

ANSWER = 32
FIRST_PROMPT = 96
SHORTEST_PROMPT, LONGEST_PROMPT = 4, 512
CALIBRATION_VERSIONS = 6
ATTEMPTS = 3
TARGET = 1.08
"""The wanted ratio of training time to generation time. It is above 1, so that the trainer does not have to wait."""


def bench_loop(versions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each run."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        write_model(directory / "model")
        prompt = _balance(directory, say)

        def measure(name: str, depth: int, threads: int) -> dict[str, Any]:
            say(f"{name}: {versions} versions, depth {depth}, {threads} thread(s) a process")
            return _measure(directory, name, prompt=prompt, versions=versions, depth=depth, threads=threads)

        synchronous = measure("depth-0", 0, 1)
        asynchronous = measure("depth-2", 2, 1)
        two_threads = measure("depth-0-two-threads", 0, 2)
    balance = synchronous["training_seconds"] / synchronous["generation_seconds"]
    return {
        "versions": versions,
        "prompt_tokens": prompt,
        "answer_tokens": ANSWER,
        "training_over_generation": balance,
        "depth_0": synchronous,
        "depth_2": asynchronous,
        "depth_0_two_threads": two_threads,
        "ratio": asynchronous["tokens_per_second"] / synchronous["tokens_per_second"],
        "ratio_to_two_threads": asynchronous["tokens_per_second"] / two_threads["tokens_per_second"],
    }


def _balance(directory: Path, say: Callable[[str], None]) -> int:
    """Return a prompt length at which training takes about `TARGET` times as long as generation.

    Generation computes a prompt once for each group, and training once for each answer. So a longer prompt gives the
    trainer more work than the engine. Both times are close to linear in the length of the prompt.
    """
    points: list[tuple[int, float, float]] = []
    prompt = FIRST_PROMPT
    for attempt in range(ATTEMPTS):
        say(f"balancing, try {attempt + 1}: prompts of {prompt} tokens")
        found = _measure(
            directory, f"balance-{attempt}", prompt=prompt, versions=CALIBRATION_VERSIONS, depth=0, threads=1
        )
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
    config = loop_config(directory, name, prompt=prompt, answer=ANSWER, versions=versions, depth=depth, threads=threads)
    summary = start_run(config, NoProgress()).summary
    seconds = summary["train_seconds"]
    return {
        "tokens_per_second": summary["tokens_per_second"],
        "tokens_trained": summary["tokens_trained"],
        "seconds": seconds,
        "generation_seconds": seconds * (1 - summary["engine_idle_fraction"]),
        "training_seconds": seconds * (1 - summary["trainer_idle_fraction"]),
        "trainer_idle_fraction": summary["trainer_idle_fraction"],
        "engine_idle_fraction": summary["engine_idle_fraction"],
        "lag_mean": summary["lag_mean"],
        "lag_max": summary["lag_max"],
    }
