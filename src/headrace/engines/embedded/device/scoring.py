"""Scores sequences without the cache. Lengths that are scored often, such as canaries, are captured once and replayed.

Enqueuing a pass kernel by kernel takes the host longer than a decode step lasts, so every canary would stop decoding.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.device.graphs import CAPTURE_ERRORS, Record, Replay, first_line
from headrace.engines.embedded.device.transfer import Arriving
from headrace.engines.embedded.runner import score_ids
from headrace.types import Int32Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Captured:
    """A captured pass over `ids`. A replay writes its log-probabilities to `scores`."""

    replay: Replay
    ids: torch.Tensor
    scores: torch.Tensor


class TokenScores:
    """Scores token sequences on the current stream."""

    def __init__(self, model: Any, device: torch.device, record: Record | None) -> None:
        self._model = model
        self._device = device
        self._record = record
        self._captured: dict[int, _Captured] = {}

    def prepare(self, length: int) -> None:
        """Capture the pass over sequences of this length once, so that they are scored by replay from now on."""
        if self._record is None or length in self._captured:
            return
        ids = torch.zeros(length, dtype=torch.int64, device=self._device)
        # Run once outside of the graph, so that kernels are compiled and library handles are made.
        scores = torch.empty_like(score_ids(self._model, ids))
        try:
            replay = self._record(lambda: scores.copy_(score_ids(self._model, ids)))
        except CAPTURE_ERRORS as error:
            logger.warning("canaries are scored uncaptured: %s", first_line(error))
            self._record = None
        else:
            self._captured[length] = _Captured(replay, ids, scores)

    def begin(self, token_ids: Int32Array) -> Arriving:
        """Begin to score tokens 1..n given their prefix."""
        host = torch.from_numpy(np.array(token_ids, np.int64))
        # Pinned, because a copy from other memory would wait for all work that was launched before.
        host = host.pin_memory() if self._device.type == "cuda" else host
        captured = self._captured.get(len(host))
        if captured is None:
            return Arriving(score_ids(self._model, host.to(self._device, non_blocking=True)))
        captured.ids.copy_(host, non_blocking=True)
        captured.replay()
        return Arriving(captured.scores)
