"""The report of the trainer about one step. It does not import torch, because the controller reads it."""

from __future__ import annotations

import msgspec


class StepReport(msgspec.Struct, kw_only=True):
    """The report of one optimizer step."""

    step: int
    """The step number of the batch."""
    version: int
    """The version that was being trained."""
    objective: str
    loss: float
    grad_norm: float
    """The norm of the gradient before clipping."""
    learning_rate: float
    tokens: int
    """The number of tokens that the forward passes computed. A shared prefix counts once, and tokens after the last
    trained token of a sequence are not computed."""
    sequence_tokens: int
    """The number of tokens of all sequences. A trainer that shares no prefixes would compute about this many."""
    trained_tokens: int
    micro_batches: int
    seconds: float
    skipped: bool = False
    """Whether the weights stayed the same, because the gradient was not finite or the batch held no trained token."""
    skipped_steps: int = 0
    """The number of skipped steps since the trainer's first step, this step included."""
    metrics: dict[str, float] = {}
    """The mean of each metric over the trained tokens of the step."""
