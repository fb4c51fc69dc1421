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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.bench.shared_work import (
    WARM_VERSIONS,
    SharedBench,
    check_options,
    faster_training,
    held_by,
    lasting_versions,
    run_config,
    steady_rate,
)
from headrace.bench.workload import write_tokenizer
from headrace.buffer.reader import open_readonly
from headrace.errors import HeadraceError, UserError
from headrace.models.shapes import SHAPES, build_shape
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.training.devices import choose_device

Say = Callable[[str], None]

ALONE_SECONDS = 600.0
ROUNDS = 4
"""For generation alone: the number of requests, as a multiple of the answers in flight. The rate is measured until the
last request has a slot."""
_SAMPLE_SECONDS = 0.25
_WATCH_END_SECONDS = 10.0


def bench_shared(options: SharedBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    check_options(options)
    options = msgspec.structs.replace(options, depth=options.depth or lasting_versions(options.lengths))
    cuda = choose_device(options.device) == "cuda"
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        directory = Path(scratch)
        model, weights = _model(options, directory, say, cuda=cuda)

        def measure(depth: int) -> dict[str, Any]:
            say(f"depth {depth}: {options.versions} versions of {options.in_flight} answers, and those at both ends")
            return _run(run_config(options, directory, model, weights, depth, cuda=cuda), depth, cuda=cuda)

        synchronous = measure(0)
        asynchronous = measure(options.depth)
        say("generation alone")
        generation = _generation(options, model, weights, cuda=cuda)
    trained_in, training = faster_training({"synchronous": synchronous, "asynchronous": asynchronous})
    bound = 1 / (1 / generation + 1 / training)
    return {
        "bench": "loop",
        "model": options.model,
        "device": "cuda" if cuda else "cpu",
        "device_name": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "arguments": msgspec.to_builtins(options),
        "synchronous": synchronous,
        "asynchronous": asynchronous,
        "ratio": asynchronous["tokens_per_second"] / synchronous["tokens_per_second"],
        "generation_alone": generation,
        "training_alone": training,
        "training_alone_from": trained_in,
        "bound_without_overlap": bound,
        "of_the_bound": asynchronous["tokens_per_second"] / bound,
    }


def _model(options: SharedBench, directory: Path, say: Say, *, cuda: bool) -> tuple[Path, str]:
    """Return a model directory with a tokenizer, and the value of `[model] weights`: "load" or "random"."""
    given = Path(options.model)
    if given.is_dir():
        return given, "load" if any(given.glob("*.safetensors")) else "random"
    if options.model not in SHAPES:
        raise UserError(f"{options.model} is neither a model directory nor a shape (one of {', '.join(SHAPES)})")
    say(f"writing a random {options.model}")
    path = directory / "model"
    model = build_shape(options.model, "bfloat16" if cuda else "float32", "cuda" if cuda else "cpu", options.seed)
    model.save_pretrained(path)
    del model
    if cuda:
        torch.cuda.empty_cache()
    write_tokenizer(path)
    return path, "load"


def _run(config: Any, depth: int, *, cuda: bool) -> dict[str, Any]:
    with _watched_memory(cuda=cuda) as memory:
        outcome = start_run(config, NoProgress())
    if why := outcome.summary["no_mps"]:
        raise UserError(f"--one-gpu mps: {why}")
    with open_readonly(outcome.run_dir.journal) as journal:
        steps = [msgspec.structs.asdict(step) for step in journal.steps()]
        held = journal.meta().get("peak_memory_bytes", {})
    names = ("trainer_idle_fraction", "engine_idle_fraction", "lag_mean", "lag_max", "train_seconds")
    return (
        steady_rate(steps, depth, WARM_VERSIONS + depth)
        | {name: outcome.summary[name] for name in names}
        | {"tokens_per_second_with_ends": outcome.summary["tokens_per_second"], "peak_memory_bytes": memory[0] or None}
        | {f"{role}_peak_memory_bytes": held_by(role, held) for role in ("trainer", "engine")}
    )


@contextmanager
def _watched_memory(*, cuda: bool) -> Iterator[list[int]]:
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
    if cuda:
        thread.start()
    try:
        yield peak
    finally:
        done.set()
        if cuda:
            thread.join(_WATCH_END_SECONDS)


def _generation(options: SharedBench, model: Path, weights: str, *, cuda: bool) -> float:
    """Return the tokens per second of the engine alone while all its slots are taken, in a process of its own."""
    kind, _, rest = options.lengths.partition(":")
    command = [sys.executable, "-m", "headrace", "bench", "engine", str(model), "--json", "--rescore", "0"]
    command += ["--batch", str(options.in_flight), "--requests", str(ROUNDS * options.in_flight)]
    command += ["--prompt", str(options.prompt), "--group-size", str(options.group_size)]
    command += ["--device", "cuda" if cuda else "cpu", "--seed", str(options.seed)]
    command += ["--generate", rest] if kind == "equal" else ["--lengths", options.lengths]
    command += ["--random-weights"] if weights == "random" else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=ALONE_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise HeadraceError(f"the engine alone could not be measured: {last}")
    return float(json.loads(done.stdout)["tokens_per_second_while_full"])
