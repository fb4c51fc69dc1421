"""What an engine counts: for benchmarks and tests. The controller never asks for it."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct, kw_only=True):
    """Where an engine stands, as of some moment near the call."""

    version: int
    """The version that its weights are proved to be; -1 before the first proof and in quarantine."""
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    free_blocks: int
    """Blocks of the KV cache that no running sequence holds."""
    total_blocks: int
    preemptions: int = 0
    """Sequences that lost their blocks to others and were computed again. Only the embedded engine counts them."""
