"""`headrace bench loop`: compares synchronous and asynchronous runs of one workload.

Every run is real: engine and trainer are processes of their own, and every version is delivered and proved. Rates count
*consumed* tokens, which are those that reached a loss.

Without a model, a tiny one is measured. Rates are over the whole time of training, including the beginning, when the
buffer fills, and the end, when it empties. The workload is first balanced, so that generating and training a version
take about the same time, because asynchrony can gain most there. The figures say how close the balance was. With
`--long-tail`, answers have very different lengths. Synchronous and asynchronous runs take turns, so that other work on
the machine slows both down alike.

With a model, engine and trainer are on one device. Generation alone is measured with the same answer lengths and number
of answers in flight. The rate of training alone is that inside optimizer steps, in the run whose steps were faster. If
generation and training never overlap, no schedule can consume more than 1 / (1/generation + 1/training) tokens per
second. The asynchronous run is compared with this bound.
"""

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

from headrace.bench import workload
from headrace.bench.options import LoopBench, Say
from headrace.buffer.reader import open_readonly
from headrace.errors import HeadraceError, UserError
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run

VERSIONS, MODEL_VERSIONS, TAIL_VERSIONS = 30, 6, 25
ANSWER = 32
FIRST_PROMPT, SHORTEST_PROMPT, LONGEST_PROMPT = 96, 4, 512
BALANCE_VERSIONS, BALANCE_ATTEMPTS = 6, 3
BALANCE = 1.08
"""The wanted ratio of training time to generation time. It is above 1, so that the trainer does not have to wait."""
TAIL_PROMPT, TAIL_LONGEST = 8, 400
TAIL_GROUPS, TAIL_GROUP_SIZE = 16, 2
DEPTHS = (0, 2)
LEAST_TAIL_VERSIONS = workload.WARM_VERSIONS + max(DEPTHS) + 1
ALONE_SECONDS = 600.0
ROUNDS = 4
"""For generation alone: the number of requests, as a multiple of the answers in flight. The rate is measured until the
last request has a slot."""
MEAN_OF = 100_000
"""The number of lengths that are drawn to estimate the mean length of an answer."""
_SAMPLE_SECONDS = 0.25


def bench_loop(options: LoopBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    if options.long_tail and 0 < options.versions < LEAST_TAIL_VERSIONS:
        raise UserError(f"--versions {options.versions}: at least {LEAST_TAIL_VERSIONS} with --long-tail")
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        if options.model:
            return _model(Path(scratch), options, say)
        workload.write_model(Path(scratch) / "model")
        if options.long_tail:
            return _long_tail(Path(scratch), options.versions or TAIL_VERSIONS, options.rounds, say)
        return _tiny(Path(scratch), options.versions or VERSIONS, say)


def _tiny(directory: Path, versions: int, say: Say) -> dict[str, Any]:
    def measure(name: str, prompt: int, versions: int, depth: int, threads: int) -> dict[str, Any]:
        say(f"{name}: {versions} versions, prompts of {prompt} tokens, depth {depth}, {threads} thread(s) a process")
        given = {"prompt": prompt, "answer": ANSWER, "versions": versions, "depth": depth, "threads": threads}
        summary = start_run(workload.tiny_config(directory, name, **given), NoProgress()).summary
        seconds = summary["train_seconds"]
        names = ("tokens_per_second", "tokens_trained", "trainer_idle_fraction", "engine_idle_fraction", "lag_mean")
        return {name: summary[name] for name in (*names, "lag_max")} | {
            "seconds": seconds,
            "generation_seconds": seconds * (1 - summary["engine_idle_fraction"]),
            "training_seconds": seconds * (1 - summary["trainer_idle_fraction"]),
        }

    points: list[tuple[int, float, float]] = []
    prompt = FIRST_PROMPT
    for attempt in range(BALANCE_ATTEMPTS):
        found = measure(f"balance-{attempt}", prompt, BALANCE_VERSIONS, 0, 1)
        points.append((prompt, found["generation_seconds"], found["training_seconds"]))
        if abs(found["training_seconds"] / found["generation_seconds"] / BALANCE - 1) < 0.05:
            break
        prompt = next_prompt(points)
    synchronous = measure("depth-0", prompt, versions, 0, 1)
    asynchronous = measure("depth-2", prompt, versions, 2, 1)
    two_threads = measure("depth-0-two-threads", prompt, versions, 0, 2)
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


def next_prompt(points: list[tuple[int, float, float]]) -> int:
    """Return the prompt length to try next, from the length, generation time and training time of each try.

    Generation computes a prompt once for each group, and training once for each answer. So a longer prompt gives the
    trainer more work than the engine, and both times are close to linear in its length. The excess of a try is its
    training time minus `BALANCE` times its generation time. The next length is where the line through the last two
    excesses crosses zero. After the first try, it is a proportional guess.
    """
    excess = [(prompt, training - BALANCE * generation) for prompt, generation, training in points]
    if len(excess) == 1:
        prompt, generation, training = points[0]
        guess = (prompt + ANSWER) * BALANCE * generation / training - ANSWER
    else:
        (x0, y0), (x1, y1) = excess[-2:]
        guess = x1 if x0 == x1 or y0 == y1 else x1 - y1 * (x1 - x0) / (y1 - y0)
    return min(max(round(guess), SHORTEST_PROMPT), LONGEST_PROMPT)


def _long_tail(directory: Path, versions: int, rounds: int, say: Say) -> dict[str, Any]:
    """Measure each depth `rounds` times. At every depth, the engine has slots for all answers of the deepest run."""
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in DEPTHS}
    for number in range(rounds):
        for depth in DEPTHS if number % 2 == 0 else reversed(DEPTHS):
            config = workload.run_config(
                directory,
                f"depth-{depth}-{number}",
                versions=versions,
                depth=depth,
                prompt=TAIL_PROMPT,
                lengths=f"long-tail:{TAIL_LONGEST}",
                groups=TAIL_GROUPS,
                group_size=TAIL_GROUP_SIZE,
                engine={"slots": (max(DEPTHS) + 1) * TAIL_GROUPS * TAIL_GROUP_SIZE, "device": "cpu"},
                training={"device": "cpu"},
            )
            found, _ = workload.measure_run(config, depth, workload.WARM_VERSIONS)
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


def _model(directory: Path, options: LoopBench, say: Say) -> dict[str, Any]:
    # Imported late, because it loads torch.
    from headrace.bench.base import begin, choose_dtype, free_memory, load

    options = msgspec.structs.replace(
        options,
        versions=options.versions or MODEL_VERSIONS,
        depth=options.depth or lasting_versions(options.lengths),
    )
    device, found = begin("loop", options)
    dtype, model, weights = choose_dtype("", device), Path(options.model), "load"
    if not model.is_dir():
        say(f"writing a random {options.model}")
        model = directory / "model"
        load(options.model, dtype, device, options.seed).save_pretrained(model)
        free_memory(device)
        workload.write_tokenizer(model)
    elif not any(model.glob("*.safetensors")):
        weights = "random"

    def measure(depth: int) -> dict[str, Any]:
        """Make one run. A version trains as many answers as are in flight."""
        say(f"depth {depth}: {options.versions} versions of {options.in_flight} answers, and those at both ends")
        config = workload.run_config(
            Path(options.keep or directory),
            f"depth-{depth}",
            versions=workload.WARM_VERSIONS + depth + options.versions + depth,
            depth=depth,
            prompt=options.prompt,
            lengths=options.lengths,
            groups=options.in_flight // options.group_size,
            group_size=options.group_size,
            run={"seed": options.seed},
            model={"path": str(model), "weights": weights, "dtype": dtype},
            engine={"slots": options.in_flight, "device": device},
            training={"device": device, "micro_batch_tokens": options.micro_batch_tokens},
            pipeline={"stall_seconds": 300.0},
            observe={"timeline": bool(options.keep)},
        )
        with _watched_memory(device) as memory:
            measured, outcome = workload.measure_run(config, depth, workload.WARM_VERSIONS + depth)
        with open_readonly(outcome.run_dir.journal) as journal:
            held = journal.meta().get("peak_memory_bytes", {})
        return measured | {
            "train_seconds": outcome.summary["train_seconds"],
            "tokens_per_second_with_ends": outcome.summary["tokens_per_second"],
            "peak_memory_bytes": memory[0] or None,
            **{f"{role}_peak_memory_bytes": held_by(role, held) for role in ("trainer", "engine")},
        }

    runs = {"synchronous": measure(0), "asynchronous": measure(options.depth)}
    rates = {name: run["tokens_per_second"] for name, run in runs.items()}
    say("generation alone")
    generation = _generation(options, model, weights, device)
    trained_in, training = faster_training(runs)
    bound = 1 / (1 / generation + 1 / training)
    return {
        **found,
        **runs,
        "ratio": rates["asynchronous"] / rates["synchronous"],
        "generation_alone": generation,
        "training_alone": training,
        "training_alone_from": trained_in,
        "bound_without_overlap": bound,
        "of_the_bound": rates["asynchronous"] / bound,
    }


def lasting_versions(lengths: str) -> int:
    """Return how many versions are trained while the longest answer is generated, and at least 2.

    With a smaller depth, training would wait for the longest answer.
    """
    # A version trains as many answers as are in flight: about one while an answer of mean length is generated.
    return max(2, round(workload.longest_of(lengths) / float(workload.make_lengths(lengths, MEAN_OF, 0).mean())))


@contextmanager
def _watched_memory(device: str) -> Iterator[list[int]]:
    """Watch the GPU's memory. Yield a list of one number: the most bytes that all processes together had in use."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        import torch

        while not done.wait(_SAMPLE_SECONDS):
            free, total = torch.cuda.mem_get_info()
            peak[0] = max(peak[0], total - free)

    if device == "cuda":
        threading.Thread(target=watch, name="memory", daemon=True).start()
    try:
        yield peak
    finally:
        done.set()


def faster_training(runs: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """Return the name of the run whose steps trained more tokens per second, and this rate.

    The time of a step begins when the trainer has the GPU. Work of the engine beside a step can only slow the step
    down. So the faster run is closer to training alone, and gives the higher bound.
    """
    name = max(runs, key=lambda run: float(runs[run]["training_tokens_per_second"]))
    return name, float(runs[name]["training_tokens_per_second"])


def held_by(role: str, peaks: dict[str, int]) -> int | None:
    """Return the sum of the peak GPU memory of a role's processes in bytes; None if no process has reported it."""
    return sum(peak for process, peak in peaks.items() if process.startswith(f"{role}-")) or None


def _generation(options: LoopBench, model: Path, weights: str, device: str) -> float:
    """Return the tokens per second of the engine alone, in a process of its own, until the last request has a slot."""
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
