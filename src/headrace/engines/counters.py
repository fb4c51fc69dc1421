"""The counters of an engine, for benchmarks and tests. The controller does not use them."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct, kw_only=True):
    """The counters and the occupancy of an engine, at some moment near the call."""

    version: int
    """The version that the engine's weights are proved to be; -1 before the first proof and in quarantine."""
    running: int
    waiting: int
    generated_tokens: int
    prefilled_tokens: int
    free_blocks: int
    """The number of blocks of the KV cache that no running sequence holds."""
    total_blocks: int
    preemptions: int = 0
    """How often a sequence lost its blocks to others and was computed again. Only the embedded engine counts this."""
