"""Measures what it costs to sample the tokens of one step on a GPU, replayed as a CUDA graph.

    python benchmarks/sampling.py

There are two batches of bfloat16 logits, each flat (scale 1) and peaked (scale 5). For each, the script prints the
milliseconds of a step without truncation, with top-p 0.95, with top-k 50, with both, and with the kept tokens recorded.
For comparison, it prints the time to read the logits once, to find their maximum.
"""

from __future__ import annotations

import torch

from headrace.bench.timing import gpu_seconds
from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.kernels.sampling import SamplingRows, sample

SIZES = ((256, 151936), (1024, 49152))
RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "no rule, filtered": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "record": {"record_kept": True},
}


def measure(batch: int, vocabulary: int, scale: float) -> None:
    """Measure one batch, and print a line for each truncation rule."""
    logits = (torch.randn(batch, vocabulary, device="cuda") * scale).bfloat16()
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    ids = torch.empty(batch, KEPT_LIMIT, dtype=torch.int32, device="cuda")
    counts = torch.empty(batch, dtype=torch.int32, device="cuda")
    print(f"batch {batch}, vocabulary {vocabulary}, scale {scale}")
    print(f"  {'one read (amax)':24} {1e3 * gpu_seconds(lambda: logits.amax(-1), replayed=20):7.3f} ms")
    for name, rule in RULES.items():
        params = SamplingRows(batch, "cuda")
        samplings = [Sampling(max_tokens=1, seed=i, **rule) for i in range(batch)]  # type: ignore[arg-type]
        params.set(torch.arange(batch), samplings)

        def step(params: SamplingRows = params, plain: bool = name == "plain", record: bool = name == "record") -> None:
            recorders = {"kept_ids": ids, "kept_counts": counts} if record else {}
            sample(logits, rows, rows, params, filtered=not plain, **recorders)

        print(f"  {name:24} {1e3 * gpu_seconds(step, replayed=20):7.3f} ms")


def main() -> None:
    """Measure all sizes."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/sampling.py needs a GPU")
    torch.manual_seed(0)
    for batch, vocabulary in SIZES:
        for scale in (1.0, 5.0):
            measure(batch, vocabulary, scale)


if __name__ == "__main__":
    main()
