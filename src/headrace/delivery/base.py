"""What travels with weights: a manifest that says exactly what was published, and a proof that it arrived.

Delivery knows neither trainers nor engines: it takes `(canonical name, tensor)` pairs on one side and gives them back
on the other. No torch here: the controller passes manifests on and never sees a weight.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.types import NO_VERSION, POLICY, Float32Array, Int32Array

Kind = Literal["full", "delta", "adapter"]
"""All weights; only what changed since another version; the tensors of a LoRA adapter, whose base is never sent."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor in the packed bytes."""

    name: str
    dtype: str
    """`float32`, `bfloat16`, ..."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Canary(msgspec.Struct, kw_only=True):
    """A fixed sequence and the trainer's own log-probabilities of its tokens 1..n under the published weights."""

    token_ids: Int32Array
    logprobs: Float32Array
    tolerance: float | None = None
    """Largest difference that is no mistake; None: each engine finds its own, see `delivery.canary`."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a sharded trainer published: a region of some tensors."""

    location: str
    entries: list[Entry]
    """Their shapes are those of the regions."""
    starts: list[tuple[int, ...]]
    """Where each region begins in its whole tensor."""


class Manifest(msgspec.Struct, kw_only=True):
    """Everything an engine needs to fetch, check and prove a version."""

    version: int
    policy: str = POLICY
    """Whose weights these are; `version`, `parent` and `base` are its versions."""
    parent: int
    """The version these weights were trained from; -1 for the first."""
    step: int
    transport: str
    location: str
    """Where the transport finds the bytes (for `shm`: the segment's path)."""
    entries: list[Entry]
    """The weights as they are once they have arrived, whatever the kind."""
    plan_digest: int
    """Of the entries: both sides must have the same plan."""
    digest: int
    """Of the weights, keyed by (canonical name, flat index); see `delivery.digest`."""
    canary: Canary
    kind: Kind = "full"
    base: int = NO_VERSION
    """delta: the version that it changes."""
    base_digest: int = 0
    """adapter: of the weights that it was trained on."""
    payload: list[Entry] | None = None
    """What lies at the location, where that is not the entries themselves."""
    parts: list[Part] = []
    """The places of a version that several ranks published; then `location` is empty and `entries` are the whole."""


class Proof(msgspec.Struct, kw_only=True):
    """An engine's answer to a manifest."""

    engine: str
    version: int
    accepted: bool
    """False: nothing was swapped (rejected while staged) or the live weights are wrong (`quarantined`)."""
    quarantined: bool = False
    """The live weights do not match: the engine serves nothing until a later version is proved."""
    reason: str = ""
    staged_digest: int = 0
    live_digest: int = 0
    canary_error: float = 0.0
    """Largest absolute difference of the canary's log-probabilities."""
    stage_seconds: float = 0.0
    swap_seconds: float = 0.0
    """How long decoding stood still: the copy, the live digest and the canary; on a GPU the copy alone."""
