"""A teacher's scores of one row, from a teacher that the trainer holds, or from the record of one outside of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.algorithms.losses.teacher import TopTokens
from headrace.training.devices import upload
from headrace.training.logprobs import Readings
from headrace.training.rows import MicroBatch
from headrace.types import Int32Array, TeacherScores


class Lesson(NamedTuple):
    """The scores of a row's M targets. The likeliest tokens are None if only the targets are compared."""

    logprobs: torch.Tensor  # [M]
    top_ids: Int32Array | None = None  # [M, k], on the host, where readings are planned
    top: torch.Tensor | None = None  # [M, k]
    tail: torch.Tensor | None = None  # [M]

    @classmethod
    def read(cls, readings: Readings) -> Lesson:
        """Return what a teacher inside the trainer has read. Waits for the device if there are likeliest tokens."""
        if readings.top_ids is None:
            return cls(readings.logprobs)
        ids = readings.top_ids.cpu().numpy().astype(np.int32)
        return cls(readings.logprobs, ids, readings.top, readings.tail)

    @classmethod
    def recorded(cls, scores: TeacherScores, row: MicroBatch, device: torch.device) -> Lesson:
        """Return what is recorded for the targets of this row."""
        mine = scores.at(row.sources)
        logprobs = upload(mine.logprobs, device)
        if not mine.k:
            return cls(logprobs)
        return cls(logprobs, mine.top_ids, upload(mine.top_logprobs, device), upload(mine.tails, device))

    def beside(self, policy: Readings) -> TopTokens | None:
        """Return the likeliest tokens under the teacher, beside the policy's readings of the same tokens."""
        if policy.top is None or policy.tail is None or self.top is None or self.tail is None:
            return None
        return TopTokens(policy.top, policy.tail, self.top.to(policy.top), self.tail.to(policy.tail))
