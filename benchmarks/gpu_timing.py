"""The time of work on a GPU, by the clock of the GPU, for the other scripts of this directory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def gpu_seconds(work: Callable[[], object], *, replayed: int = 0, runs: int = 7) -> float:
    """Return the median seconds of one call of the work. A first call is not counted.

    With `replayed`, a run is the replay of a CUDA graph of this many calls, so that the host's launches take no part.
    """
    work()
    torch.cuda.synchronize()
    run = work
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(replayed):
                work()
        run = graph.replay
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / (replayed or 1))
    return statistics.median(times)
