"""What the plugin and the engine that drives it say to each other. No torch, no vLLM: both sides import it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from headrace.delivery.base import Entry

BACKEND = "headrace"
"""The name of the weight-transfer engine."""
PROTOCOL = 3
"""Counts changes of what is said here; both sides must have the same."""
TRUNCATION = "headrace_truncation"
"""Among the `extra_args` of a request: how the plugin truncates it, which vLLM is not asked to then."""


class Facts(msgspec.Struct, kw_only=True):
    """What a worker is and can do."""

    protocol: int
    vllm: str
    """Its version."""
    backend: str
    """Of its weight transfer; empty without one."""
    model: str
    dtype: str
    vocabulary: int
    max_length: int
    logprobs_mode: str
    slots: int
    blocks: int
    block_size: int
    prefix_caching: bool
    workers: int
    position_noise: bool
    """Whether a token's noise follows from (seed, position)."""
    truncation: bool
    """Whether it heeds a request's `Truncation`."""


class Truncation(msgspec.Struct, frozen=True):
    """`top_k`, then `top_p` of the mass that is left, then `min_p`; 0, 1 and 0 cut nothing."""

    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class FetchOrder(msgspec.Struct, kw_only=True):
    """What to fetch: the part of a manifest that a worker needs."""

    version: int
    transport: str
    location: str
    entries: list[Entry]
    plan_digest: int
    digest: int
    keys: str = ""
    """The file with the keys of the run, for transports that encrypt."""
    scaling: float | None = None
    """An adapter: what its product is multiplied by."""
    base_digest: int = 0
    """An adapter: of the weights that it is added to."""


class Accepted(msgspec.Struct, kw_only=True):
    """Whether a fetch began."""

    error: str = ""


class StagingState(msgspec.Struct, kw_only=True):
    """How a fetch stands."""

    version: int
    done: bool = False
    error: str = ""
    digest: int = 0
    seconds: float = 0.0


class Live(msgspec.Struct, kw_only=True):
    """The visible part of the live weights against the same part of what was staged."""

    visible: int = 0
    hidden: int = 0
    digest: int = 0
    """Of all weights, where all are visible."""
    wrong: list[str] = []
    """Tensors whose live bytes are not the staged ones."""
    missing: list[str] = []
    """Parameters that the last version did not fill."""
