"""CUDA graphs: a recorder for any work, and the graphs of scored sequences.

If a capture fails, one line of the log says so, and that kind of work runs uncaptured from then on.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.runner import likeliest_of, score_ids
from headrace.engines.embedded.transfer import Arriving
from headrace.types import Float32Array, Int32Array

logger = logging.getLogger(__name__)

Replay = Callable[[], object]
"""Repeats recorded work on the current content of its buffers."""
Record = Callable[[Callable[[], object]], Replay]
"""Records the work that a function enqueues, without executing it. The function must have run once before."""


def make_recorder(device: torch.device, *, capture: bool) -> Record | None:
    """Return a function that captures CUDA graphs, or None if nothing is to be captured."""
    if not capture or device.type != "cuda":
        return None
    # One pool for all graphs, because they are replayed one after the other on one stream.
    pool = torch.cuda.graph_pool_handle()

    def record(body: Callable[[], object]) -> Replay:
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # `thread_local`, because other threads may stage weights during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            body()
        return graph.replay

    return record


def try_to_record(record: Record, what: str, body: Callable[[], object]) -> Replay | None:
    """Record work. If that fails, say in one line of the log that `what` happens uncaptured, and return None."""
    try:
        return record(body)
    except (RuntimeError, torch.AcceleratorError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        logger.warning("%s uncaptured: %s", what, line)
        return None


class TokenScores:
    """Scores sequences without the cache, on the current stream.

    Lengths that are scored often, such as canaries, are captured once and replayed. Enqueuing a pass kernel by kernel
    takes the host longer than a decode step lasts, so every canary would stop decoding.
    """

    def __init__(self, model: Any, device: torch.device, record: Record | None) -> None:
        self._model = model
        self._device = device
        self._record = record
        # By length: a replay, the ids that it reads, and the log-probabilities that it writes.
        self._captured: dict[int, tuple[Replay, torch.Tensor, torch.Tensor]] = {}

    def prepare(self, length: int) -> None:
        """Capture the pass over sequences of this length once, so that they are scored by replay from now on."""
        if self._record is None or length in self._captured:
            return
        ids = torch.zeros(length, dtype=torch.int64, device=self._device)
        # Run once outside of the graph, so that kernels are compiled and library handles are made.
        scores = torch.empty_like(score_ids(self._model, ids))
        replay = try_to_record(self._record, "canaries are scored", lambda: scores.copy_(score_ids(self._model, ids)))
        if replay is None:
            self._record = None
        else:
            self._captured[length] = replay, ids, scores

    def begin(self, token_ids: Int32Array) -> Arriving:
        """Begin to score tokens 1..n given their prefix."""
        host = torch.from_numpy(np.array(token_ids, np.int64))
        # Pinned, because a copy from other memory would wait for all work that was launched before.
        host = host.pin_memory() if self._device.type == "cuda" else host
        captured = self._captured.get(len(host))
        if captured is None:
            return Arriving(score_ids(self._model, host.to(self._device, non_blocking=True)))
        replay, ids, scores = captured
        ids.copy_(host, non_blocking=True)
        replay()
        return Arriving(scores)

    def likeliest(self, token_ids: Int32Array, temperatures: Float32Array, k: int, vocabulary: int) -> Arriving:
        """Begin to score tokens 1..n with the likeliest tokens in their places. Such passes are never captured."""
        return Arriving(likeliest_of(self._model, token_ids, temperatures, k, vocabulary, self._device))
