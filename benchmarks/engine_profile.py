"""Shows which kernels take the time of decode steps on a GPU: `python benchmarks/engine_profile.py SHAPE BATCH`.

Torch's profiler records a few steps in the middle of the measured round of `headrace bench engine`. A call of
`EngineCore.step` launches several steps where a step is short, so the recorded calls may hold a few steps more.
"""

import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.bench.engine import bench_engine
from headrace.bench.engine_rounds import WARM_TOKENS
from headrace.bench.options import EngineBench
from headrace.engines.embedded.core import EngineCore

FIRST_STEP, STEPS = WARM_TOKENS + 48, 5
"""The decode step after which recording begins, counted from the first request on, and how many steps it lasts."""


def profiled_step() -> Any:
    """Return a replacement for `EngineCore.step` that runs some steps under the profiler."""
    step, profiler, done = EngineCore.step, profile(activities=[ProfilerActivity.CUDA]), 0
    last: int | None = None

    def profiled(core: EngineCore) -> Any:
        nonlocal done, last
        if last is None and done >= FIRST_STEP:
            last = done + STEPS
            profiler.start()
        before = core.timings.steps
        deltas = step(core)
        taken = core.timings.steps - before
        done += taken
        if last is not None and done - taken < last <= done:
            torch.cuda.synchronize()
            profiler.stop()
            print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=70))
        return deltas

    return profiled


def main() -> None:
    """Profile the shape and batch given on the command line."""
    shape, batch = sys.argv[1], int(sys.argv[2])
    EngineCore.step = profiled_step()  # type: ignore[method-assign]
    bench_engine(EngineBench(model=shape, batch=batch, rescore=0.0), lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    main()
