"""What the loop benchmark of one model asks for, checked before torch is loaded, and the runs' configurations.

Answers have forced lengths, so that every run does the same work whatever its weights say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.lengths import longest_of, make_lengths
from headrace.errors import UserError

WARM_VERSIONS = 2
"""Versions at the beginning of a run that are not counted: kernels are loaded, steps captured."""

MEAN_OF = 100_000
"""Drawn lengths that their mean is taken of."""


class SharedBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench loop MODEL`, as they were given."""

    model: str
    versions: int = 6
    """That are counted; a run has others before and behind them."""
    in_flight: int = 256
    lengths: str = "lognormal:256:2048"
    prompt: int = 64
    group_size: int = 8
    depth: int = 0
    """0 takes `lasting_versions`."""
    micro_batch_tokens: int = 16384
    one_gpu: str = "turns"
    device: str = "auto"
    seed: int = 0
    keep: str = ""
    """Where the runs are left, with their timelines; nowhere if it is empty."""


def check_options(options: SharedBench) -> None:
    """Raise a one-line `UserError` for the first option that makes no sense."""
    make_lengths(options.lengths, 1, 0)
    for name in ("versions", "in_flight", "prompt", "group_size", "micro_batch_tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.in_flight % options.group_size:
        raise UserError(f"--in-flight {options.in_flight}: not a multiple of --group-size {options.group_size}")
    if options.one_gpu not in ("turns", "slices", "mps"):
        raise UserError(f"--one-gpu {options.one_gpu}: turns, slices or mps")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {options.device}: auto, cpu or cuda")


def lasting_versions(lengths: str) -> int:
    """Versions that the longest answer lasts, at least 2: a window of fewer would wait for it.

    A version trains as many answers as are in flight, so about one is trained while an answer of mean length grows.
    """
    return max(2, round(longest_of(lengths) / float(make_lengths(lengths, MEAN_OF, 0).mean())))


def run_config(options: SharedBench, directory: Path, model: Path, weights: str, depth: int, *, cuda: bool) -> Any:
    """The configuration of one measured run: a version trains as many answers as are in flight."""
    from headrace.config import make_config

    device = "cuda" if cuda else "cpu"
    longest = options.prompt + longest_of(options.lengths)
    return make_config(
        {
            "run": {
                "name": f"depth-{depth}",
                "directory": options.keep or str(directory),
                "versions": WARM_VERSIONS + depth + options.versions + depth,
                "seed": options.seed,
            },
            "model": {"path": str(model), "weights": weights, "dtype": "bfloat16" if cuda else "float32"},
            "task": {
                "kind": "environment",
                "factory": "headrace.bench.workload:LengthsTask",
                "config": {"length": options.prompt, "lengths": options.lengths},
            },
            "engine": {"slots": options.in_flight, "max_length": longest + 16, "kv": "keep", "device": device},
            "rollouts": {"group_size": options.group_size, "max_tokens": longest_of(options.lengths)},
            "buffer": {"groups": options.in_flight // options.group_size, "depth": depth},
            "training": {"device": device, "micro_batch_tokens": options.micro_batch_tokens, "learning_rate": 1e-6},
            "pipeline": {"one_gpu": options.one_gpu if cuda else "turns", "stall_seconds": 300.0},
            "observe": {"display": "none", "keep_rollouts": False, "timeline": bool(options.keep)},
        }
    )


def steady_rate(steps: list[dict[str, Any]], depth: int, warm: int) -> dict[str, float]:
    """Consumed tokens a second, from the end of the `warm` versions to where the end of the run begins to show.

    The last `depth` versions of a run are trained while nothing more is generated: they would count too well, and so
    may as many of the first, generated while the trainer was still getting ready.
    """
    counted = steps[warm : len(steps) - depth]
    seconds = counted[-1]["ended"] - steps[warm - 1]["ended"]
    tokens = sum(step["trained_tokens"] for step in counted)
    training_seconds = sum(step["seconds"] for step in counted)
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "versions": len(counted),
        "training_seconds": training_seconds,
        "training_tokens_per_second": tokens / training_seconds,
    }


def faster_training(runs: dict[str, dict[str, Any]]) -> tuple[str, float]:
    """The run whose steps trained more tokens a second, and how many.

    A step's seconds begin once the trainer has the GPU, so no wait for its turn is among them. Whatever else an engine
    does beside a step can only slow it down: the faster run is nearer to training alone, and makes the higher bound.
    """
    name = max(runs, key=lambda run: float(runs[run]["training_tokens_per_second"]))
    return name, float(runs[name]["training_tokens_per_second"])


def held_by(role: str, peaks: dict[str, int]) -> int | None:
    """The most bytes of a GPU that the processes of a role have held, each by its own peak; None if none has said."""
    return sum(peak for process, peak in peaks.items() if process.startswith(f"{role}-")) or None
