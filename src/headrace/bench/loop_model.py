"""`headrace bench loop MODEL`: compares synchronous and asynchronous runs with engine and trainer on one device.

Every run is real, and every version is delivered and proved. The rate of generation alone is measured with the same
answer lengths and the same number of answers in flight. The rate of training alone is taken from the time inside
optimizer steps, in the run whose steps were faster. If generation and training never overlap, no schedule can consume
more than 1 / (1/generation + 1/training) tokens per second. The asynchronous run is compared with this bound.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.bench.base import begin, choose_dtype, free_memory, load
from headrace.bench.options import LoopBench
from headrace.bench.report import Say
from headrace.bench.workload import (
    WARM_VERSIONS,
    longest_of,
    make_lengths,
    measure_run,
    run_config,
    write_tokenizer,
)
from headrace.buffer.reader import open_readonly
from headrace.config import Config
from headrace.errors import HeadraceError, UserError

VERSIONS = 6
ALONE_SECONDS = 600.0
ROUNDS = 4
"""For generation alone: the number of requests, as a multiple of the answers in flight. The rate is measured until the
last request has a slot."""
MEAN_OF = 100_000
"""The number of lengths that are drawn to estimate the mean length of an answer."""
_SAMPLE_SECONDS = 0.25
_WATCH_END_SECONDS = 10.0


def bench_model(options: LoopBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    options = msgspec.structs.replace(
        options,
        versions=options.versions or VERSIONS,
        depth=options.depth or lasting_versions(options.lengths),
    )
    device, found = begin("loop", options)
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        model, weights = _model(options, directory, say, device)

        def measure(depth: int) -> dict[str, Any]:
            say(f"depth {depth}: {options.versions} versions of {options.in_flight} answers, and those at both ends")
            return _measure(_config(options, directory, model, weights, depth, device), depth, device)

        synchronous = measure(0)
        asynchronous = measure(options.depth)
        say("generation alone")
        generation = _generation(options, model, weights, device)
    trained_in, training = faster_training({"synchronous": synchronous, "asynchronous": asynchronous})
    bound = 1 / (1 / generation + 1 / training)
    for other in ("long_tail", "rounds"):  # options of the tiny model
        del found["arguments"][other]
    return found | {
        "synchronous": synchronous,
        "asynchronous": asynchronous,
        "ratio": asynchronous["tokens_per_second"] / synchronous["tokens_per_second"],
        "generation_alone": generation,
        "training_alone": training,
        "training_alone_from": trained_in,
        "bound_without_overlap": bound,
        "of_the_bound": asynchronous["tokens_per_second"] / bound,
    }


def lasting_versions(lengths: str) -> int:
    """Return how many versions are trained while the longest answer is generated, and at least 2.

    With a smaller depth, training would wait for the longest answer. A version trains as many answers as are in flight,
    so about one version is trained while an answer of mean length is generated.
    """
    return max(2, round(longest_of(lengths) / float(make_lengths(lengths, MEAN_OF, 0).mean())))


def _model(options: LoopBench, directory: Path, say: Say, device: str) -> tuple[Path, str]:
    """Return a model directory with a tokenizer, and the value of `[model] weights`: "load" or "random"."""
    given = Path(options.model)
    if given.is_dir():
        return given, "load" if any(given.glob("*.safetensors")) else "random"
    say(f"writing a random {options.model}")
    path = directory / "model"
    load(options.model, choose_dtype("", device), device, options.seed).save_pretrained(path)
    free_memory(device)
    write_tokenizer(path)
    return path, "load"


def _config(options: LoopBench, directory: Path, model: Path, weights: str, depth: int, device: str) -> Config:
    """Return the configuration of one measured run. A version trains as many answers as are in flight."""
    return run_config(
        Path(options.keep or directory),
        f"depth-{depth}",
        versions=WARM_VERSIONS + depth + options.versions + depth,
        depth=depth,
        prompt=options.prompt,
        lengths=options.lengths,
        groups=options.in_flight // options.group_size,
        group_size=options.group_size,
        run={"seed": options.seed},
        model={"path": str(model), "weights": weights, "dtype": choose_dtype("", device)},
        engine={"slots": options.in_flight, "device": device},
        training={"device": device, "micro_batch_tokens": options.micro_batch_tokens},
        pipeline={"one_gpu": options.one_gpu if device == "cuda" else "turns", "stall_seconds": 300.0},
        observe={"timeline": bool(options.keep)},
    )


def _measure(config: Config, depth: int, device: str) -> dict[str, Any]:
    with _watched_memory(device) as memory:
        found, outcome = measure_run(config, depth, WARM_VERSIONS + depth)
    if why := outcome.summary["no_mps"]:
        raise UserError(f"--one-gpu mps: {why}")
    with open_readonly(outcome.run_dir.journal) as journal:
        held = journal.meta().get("peak_memory_bytes", {})
    return found | {
        "train_seconds": outcome.summary["train_seconds"],
        "tokens_per_second_with_ends": outcome.summary["tokens_per_second"],
        "peak_memory_bytes": memory[0] or None,
        **{f"{role}_peak_memory_bytes": held_by(role, held) for role in ("trainer", "engine")},
    }


@contextmanager
def _watched_memory(device: str) -> Iterator[list[int]]:
    """Watch the GPU's memory inside this context.

    The list that is yielded holds the largest number of bytes that all processes together had in use.
    """
    peak = [0]
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_SAMPLE_SECONDS):
            free, total = torch.cuda.mem_get_info()
            peak[0] = max(peak[0], total - free)

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    if device == "cuda":
        thread.start()
    try:
        yield peak
    finally:
        done.set()
        if device == "cuda":
            thread.join(_WATCH_END_SECONDS)


def faster_training(runs: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """Return the name of the run whose steps trained more tokens per second, and this rate.

    The time of a step begins when the trainer has the GPU, so it includes no wait for a turn. Work of the engine beside
    a step can only slow the step down. So the faster run is closer to training alone, and gives the higher bound.
    """
    name = max(runs, key=lambda run: float(runs[run]["training_tokens_per_second"]))
    return name, float(runs[name]["training_tokens_per_second"])


def held_by(role: str, peaks: dict[str, int]) -> int | None:
    """Return the sum of the peak GPU memory of a role's processes in bytes; None if no process has reported it."""
    return sum(peak for process, peak in peaks.items() if process.startswith(f"{role}-")) or None


def _generation(options: LoopBench, model: Path, weights: str, device: str) -> float:
    """Return the tokens per second of the engine alone while all its slots are taken, in a process of its own."""
    command = [sys.executable, "-m", "headrace", "bench", "engine", str(model), "--json", "--rescore", "0"]
    command += ["--batch", str(options.in_flight), "--requests", str(ROUNDS * options.in_flight)]
    command += ["--prompt", str(options.prompt), "--group-size", str(options.group_size)]
    command += ["--device", device, "--seed", str(options.seed), "--lengths", options.lengths]
    command += ["--random-weights"] if weights == "random" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=ALONE_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise HeadraceError(f"the engine alone could not be measured: {last}")
    return float(json.loads(done.stdout)["tokens_per_second_while_full"])
