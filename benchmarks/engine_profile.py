"""Shows which kernels take the time of decode steps on a GPU: `python benchmarks/engine_profile.py SHAPE BATCH`.

Torch's profiler records a few steps in the middle of the measured round of `headrace bench engine`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from headrace.bench.engine import bench_engine
from headrace.bench.engine_rounds import Driver, Round
from headrace.bench.options import EngineBench

MEASURED_ROUND = 3
"""The number of the measured round, counted from 1. The first request and the warm-up come before it."""
FIRST_STEP, STEPS = 40, 5


class ProfiledRound:
    """A replacement for `Driver.run` that profiles the measured round."""

    def __init__(self) -> None:
        self._rounds = 0
        self._run = Driver.run

    def __call__(self, driver: Driver, *args: Any, **kwargs: Any) -> Round:
        """Run a round. Some steps of the measured round, from `FIRST_STEP` on, run under the profiler."""
        self._rounds += 1
        if self._rounds == MEASURED_ROUND:
            _profile_steps(driver.core)
        return self._run(driver, *args, **kwargs)


def _profile_steps(core: Any) -> None:
    step, profiler, done = core.step, profile(activities=[ProfilerActivity.CUDA]), 0

    def profiled() -> Any:
        nonlocal done
        done += 1
        if done == FIRST_STEP:
            profiler.start()
        deltas = step()
        if done == FIRST_STEP + STEPS - 1:
            torch.cuda.synchronize()
            profiler.stop()
            print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=70))
        return deltas

    core.step = profiled


def main() -> None:
    """Profile the shape and batch given on the command line."""
    shape, batch = sys.argv[1], int(sys.argv[2])
    profiled = ProfiledRound()
    Driver.run = lambda driver, *args, **kwargs: profiled(driver, *args, **kwargs)  # type: ignore[method-assign]
    bench_engine(EngineBench(model=shape, batch=batch, rescore=0.0), lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    main()
