"""What the trainer says about a step. No torch here: the controller reads it."""

from __future__ import annotations

import msgspec


class StepReport(msgspec.Struct, kw_only=True):
    """One optimizer step."""

    step: int
    """The batch's step."""
    version: int
    """The version that was trained."""
    objective: str
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Tokens that the forward passes really computed: shared prefixes once, nothing after the last trained token."""
    sequence_tokens: int
    """Tokens of all sequences, as a trainer that shares nothing would count them."""
    trained_tokens: int
    micro_batches: int
    seconds: float
    skipped: bool = False
    """The weights did not change: the gradient was not finite, or the batch held no trained token."""
    skipped_steps: int = 0
    """Skipped steps since the trainer's first, this one included."""
    metrics: dict[str, float] = {}
    """Means over the step's trained tokens."""
