"""Captured steps: one CUDA graph per batch size and variant, in one memory pool, captured when first needed.

A capture that fails is said in one line, and the step runs uncaptured from then on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left

import torch

from headrace.engines.embedded.device.state import DeviceState
from headrace.engines.embedded.device.step import DecodeStep, Variant

logger = logging.getLogger(__name__)


def buckets(rows: int) -> list[int]:
    """Batch sizes that are captured: powers of two and their halfway points, up to `rows`."""
    sizes = {2, rows}
    size = 4
    while size < rows:
        sizes |= {size, size + size // 2}
        size *= 2
    # A batch of one would be a shape of its own to a compiler; it runs as two.
    return sorted(size for size in sizes if size <= max(rows, 2))


class StepGraphs:
    """Runs a step for a number of entries, by replay where that is possible."""

    def __init__(self, step: DecodeStep, state: DeviceState, *, capture: bool) -> None:
        self._step = step
        self._state = state
        self._capture = capture and state.device.type == "cuda"
        self._buckets = buckets(state.rows)
        self._graphs: dict[tuple[int, Variant], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None

    def bucket(self, entries: int) -> int:
        """The smallest batch size that holds this many entries."""
        return self._buckets[bisect_left(self._buckets, entries)]

    def prepare(self, bucket: int, variant: Variant) -> None:
        """Capture, unless that has been done. Changes the batch and the ring: call it before they are set."""
        if self._capture and (bucket, variant) not in self._graphs:
            self._state.choose([], bucket)
            self._state.cursor.zero_()
            # Once outside of the graph: kernels are compiled and library handles made.
            self._step.run(bucket, variant)
            self._state.cursor.zero_()
            try:
                self._graphs[bucket, variant] = self._captured(bucket, variant)
            except (RuntimeError, torch.AcceleratorError) as error:
                logger.warning("decode steps run uncaptured: %s", str(error).strip().splitlines()[0])
                self._capture = False

    def step(self, bucket: int, variant: Variant) -> None:
        """One step of the current batch."""
        graph = self._graphs.get((bucket, variant))
        if graph is not None:
            graph.replay()
        else:
            self._step.run(bucket, variant)

    def _captured(self, bucket: int, variant: Variant) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize(self._state.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may stage weights meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            self._step.run(bucket, variant)
        return graph
