"""The options of the loop benchmark of one model, their check, and the configurations of its runs.

The lengths of answers are fixed in advance, so that every run does the same work, whatever its weights are. No torch is
imported, so a mistake in the options is reported at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.lengths import longest_of, make_lengths
from headrace.errors import UserError

WARM_VERSIONS = 2
"""The number of first versions that are not counted, because kernels are loaded and graphs captured in them."""

MEAN_OF = 100_000
"""The number of lengths that are drawn to estimate the mean length of an answer."""


class SharedBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench loop MODEL`, as they were given."""

    model: str
    versions: int = 6
    """The number of versions that are counted. A run has more versions before and after them."""
    in_flight: int = 256
    lengths: str = "lognormal:256:2048"
    prompt: int = 64
    group_size: int = 8
    depth: int = 0
    """The depth of the asynchronous run; 0 takes `lasting_versions`."""
    micro_batch_tokens: int = 16384
    one_gpu: str = "turns"
    device: str = "auto"
    seed: int = 0
    keep: str = ""
    """The directory in which the run directories are kept, with their timelines. Empty if they are not kept."""


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
    """Return how many versions are trained while the longest answer is generated, and at least 2.

    With a smaller depth, training would wait for the longest answer. A version trains as many answers as are in flight,
    so about one version is trained while an answer of mean length is generated.
    """
    return max(2, round(longest_of(lengths) / float(make_lengths(lengths, MEAN_OF, 0).mean())))


def run_config(options: SharedBench, directory: Path, model: Path, weights: str, depth: int, *, cuda: bool) -> Any:
    """Return the configuration of one measured run. A version trains as many answers as are in flight."""
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
    """Return the consumed tokens per second, without the first `warm` and the last `depth` versions.

    The last `depth` versions are trained while nothing is generated any more, so their rate is too high. The rate of as
    many first versions may be too high as well, because they are generated while the trainer still starts.
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
    """Return the name of the run whose steps trained more tokens per second, and this rate.

    The time of a step begins when the trainer has the GPU, so it includes no wait for a turn. Work of the engine beside
    a step can only slow the step down. So the faster run is closer to training alone, and gives the higher bound.
    """
    name = max(runs, key=lambda run: float(runs[run]["training_tokens_per_second"]))
    return name, float(runs[name]["training_tokens_per_second"])


def held_by(role: str, peaks: dict[str, int]) -> int | None:
    """Return the sum of the peak GPU memory of a role's processes in bytes; None if no process has reported it."""
    return sum(peak for process, peak in peaks.items() if process.startswith(f"{role}-")) or None
