"""The messages of delivery: a manifest says exactly what was published, and a proof says whether it arrived.

Delivery knows neither trainers nor engines: it takes `(canonical name, tensor)` pairs on one side and gives them back
on the other. This module does not import torch: the controller passes manifests on and never sees a weight.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.types import NO_VERSION, POLICY, Float32Array, Int32Array

Kind = Literal["full", "delta", "adapter"]
"""What a version carries. `full`: all weights. `delta`: only the words that changed since another version. `adapter`:
the tensors of a LoRA adapter; the base weights are never sent."""


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
    """The largest accepted error; None: each engine calibrates its own tolerance, see `delivery.canary`."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version that one rank of a sharded trainer published: one region of each of some tensors."""

    location: str
    entries: list[Entry]
    """The regions as tensors: each entry has the shape of its region, not of the whole tensor."""
    starts: list[tuple[int, ...]]
    """Where each region begins in its whole tensor."""


class Manifest(msgspec.Struct, kw_only=True):
    """Everything an engine needs to fetch, check and prove a version."""

    version: int
    policy: str = POLICY
    """The policy that has these weights; `version`, `parent` and `base` are versions of this policy."""
    parent: int
    """The version these weights were trained from; -1 for the first."""
    step: int
    transport: str
    location: str
    """Where the transport finds the bytes (for `shm`: the segment's path)."""
    entries: list[Entry]
    """The tensors that an engine has after the version has arrived, for every kind of manifest."""
    plan_digest: int
    """The digest of the entries. The trainer and the engine must have the same plan."""
    digest: int
    """The digest of the weights, keyed by (canonical name, flat index); see `delivery.digest`."""
    canary: Canary
    kind: Kind = "full"
    base: int = NO_VERSION
    """For a delta: the version that the delta changes."""
    base_digest: int = 0
    """For an adapter: the digest of the base weights that the adapter was trained on."""
    payload: list[Entry] | None = None
    """The tensors at the location, if they differ from `entries`; None if they are the entries."""
    parts: list[Part] = []
    """The parts of a version that several ranks published. Then `location` is empty and `entries` are whole tensors."""


class Proof(msgspec.Struct, kw_only=True):
    """An engine's answer to a manifest."""

    engine: str
    version: int
    accepted: bool
    """False if the version was rejected while staged, so nothing was swapped, or if the live weights are wrong
    (`quarantined`)."""
    quarantined: bool = False
    """Whether the live weights do not match. The engine then serves nothing until a later version is proved."""
    reason: str = ""
    staged_digest: int = 0
    live_digest: int = 0
    canary_error: float = 0.0
    """The mean absolute difference of the canary's log-probabilities from the trainer's."""
    stage_seconds: float = 0.0
    swap_seconds: float = 0.0
    """How long decoding was stopped: for the copy, the live digest and the canary; on a GPU only for the copy."""
