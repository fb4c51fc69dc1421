"""Scoring without the cache. What is scored again and again, as canaries are, is captured once and replayed.

Launching a pass by hand costs the host more than a step lasts: decoding would stand still for every canary.
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
    """A pass over `ids`, whose log-probabilities are in `scores` when it was replayed."""

    replay: Replay
    ids: torch.Tensor
    scores: torch.Tensor


class TokenScores:
    """Scores rows of tokens on the current stream."""

    def __init__(self, model: Any, device: torch.device, record: Record | None) -> None:
        self._model = model
        self._device = device
        self._record = record
        self._captured: dict[int, _Captured] = {}

    def prepare(self, length: int) -> None:
        """Capture the pass over rows of this length, unless that was done: they are scored by replay from here on."""
        if self._record is None or length in self._captured:
            return
        ids = torch.zeros(length, dtype=torch.int64, device=self._device)
        # Once outside of the graph: kernels are compiled and library handles made.
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
        # Pinned: a copy of other memory would wait for all that was launched before.
        host = host.pin_memory() if self._device.type == "cuda" else host
        captured = self._captured.get(len(host))
        if captured is None:
            return Arriving(score_ids(self._model, host.to(self._device, non_blocking=True)))
        captured.ids.copy_(host, non_blocking=True)
        captured.replay()
        return Arriving(captured.scores)
