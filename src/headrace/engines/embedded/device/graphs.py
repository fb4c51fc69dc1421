"""CUDA graphs: how anything is captured, and the steps, one graph per batch size and variant, when first needed.

All graphs share one memory pool. A capture that fails is said in one line, and what it was of runs uncaptured from then
on.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

import torch

from headrace.engines.embedded.device.state import DeviceState
from headrace.engines.embedded.device.step import DecodeStep, Variant

logger = logging.getLogger(__name__)

Replay = Callable[[], object]
"""Does again what was recorded, with what its buffers hold now."""
Record = Callable[[Callable[[], object]], Replay]
"""Records what a function enqueues, which has run before; nothing is done yet."""
CAPTURE_ERRORS = (RuntimeError, torch.AcceleratorError)


def make_recorder(device: torch.device, *, capture: bool) -> Record | None:
    """Captures CUDA graphs in one memory pool: they are replayed on one stream, one after the other."""
    if not capture or device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(body: Callable[[], object]) -> Replay:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may stage weights meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            body()
        return graph.replay

    return record


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


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

    def __init__(self, step: DecodeStep, state: DeviceState, record: Record | None) -> None:
        self._step = step
        self._state = state
        self._record = record
        self._buckets = buckets(state.rows)
        self._replays: dict[tuple[int, Variant], Replay] = {}

    def bucket(self, entries: int) -> int:
        """The smallest batch size that holds this many entries."""
        return self._buckets[bisect_left(self._buckets, entries)]

    def prepare(self, bucket: int, variant: Variant) -> None:
        """Capture, unless that has been done. Changes the batch and the ring: call it before they are set."""
        if self._record is not None and (bucket, variant) not in self._replays:
            self._state.choose([], bucket)
            self._state.cursor.zero_()
            # Once outside of the graph: kernels are compiled and library handles made.
            self._step.run(bucket, variant)
            self._state.cursor.zero_()
            try:
                self._replays[bucket, variant] = self._record(lambda: self._step.run(bucket, variant))
            except CAPTURE_ERRORS as error:
                logger.warning("decode steps run uncaptured: %s", first_line(error))
                self._record = None

    def step(self, bucket: int, variant: Variant) -> None:
        """One step of the current batch."""
        replay = self._replays.get((bucket, variant))
        if replay is not None:
            replay()
        else:
            self._step.run(bucket, variant)
