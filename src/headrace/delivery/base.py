"""The messages of delivery: a manifest says exactly what was published, and a proof says whether it arrived.

Delivery knows neither trainers nor engines: it takes `(canonical name, tensor)` pairs on one side and gives them back
on the other. This module does not import torch: the controller passes manifests on and never sees a weight.

A manifest holds a canary, a fixed token sequence that the trainer and an engine must score alike under the same
weights. A digest proves the bytes; the canary proves that the engine computes with them. How much the results of two
programs may differ depends on dtype and device. If no tolerance is configured, an engine therefore calibrates its own
from the error of the first version, whose bytes are already proved by digest.
"""

from collections.abc import Callable, Collection
from typing import Literal

import msgspec
import numpy as np

from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, POLICY, Float32Array, Int32Array

Kind = Literal["full", "delta", "adapter"]
"""What a version carries. `full`: all weights. `delta`: only the words that changed since another version. `adapter`:
the tensors of a LoRA adapter; the base weights are never sent."""
Score = Callable[[Int32Array], Float32Array]
"""A function that returns the log-probabilities of tokens 1..n, each given the tokens before it."""
SMALLEST_TOLERANCE = 1e-3
"""The smallest calibrated tolerance. Rounding errors of float32 stay well below it."""
LARGEST_FIRST_ERROR = 0.5
"""The largest error of the first version. A larger error means that the engine runs another model."""
HEADROOM = 4.0
"""How many times larger than the first error later errors may be."""


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
    """The largest accepted error; None: each engine calibrates its own, see `Tolerance`."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version that one rank of a sharded trainer published: one region of each of some tensors."""

    location: str
    entries: list[Entry]
    """The regions as tensors: each entry has the shape of its region, not of the whole tensor."""
    starts: list[tuple[int, ...]]
    """Where each region begins in its whole tensor."""
    payload: list[Entry] | None = None
    """For a delta of this part: the tensors at the location. None if they are the entries."""


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
    """The parts of a version that several ranks published. Then `location` is empty and `entries` are whole tensors. In
    a delta, a part whose delta would not be smaller carries all its bytes."""


class Proof(msgspec.Struct, kw_only=True):
    """An engine's answer to a manifest."""

    engine: str
    version: int
    accepted: bool
    """False if the version was rejected while staged, so nothing was swapped, or if the live weights are wrong or
    incomplete (`quarantined`)."""
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


def some_names(names: Collection[str]) -> str:
    """Return the first of these names, and the number of all others."""
    return min(names) if len(names) == 1 else f"{min(names)} and {len(names) - 1} more"


def canary_sequence(vocabulary: int, length: int) -> Int32Array:
    """Return a fixed, arbitrary sequence of token ids, the same in every run of a model."""
    return np.random.default_rng(0).integers(0, vocabulary, length, dtype=np.int32)


def score_canary(version: int, token_ids: Int32Array, tolerance: float | None, score: Score) -> Canary:
    """Score the canary of a version in the trainer; engines are compared with these log-probabilities.

    Raises `DeliveryError` if the log-probabilities have the wrong shape or are not finite.
    """
    logprobs = np.asarray(score(token_ids), np.float32)
    if logprobs.shape != (len(token_ids) - 1,):
        raise DeliveryError(f"the canary of version {version} has log-probabilities of shape {logprobs.shape}")
    if not np.isfinite(logprobs).all():
        raise DeliveryError(f"the canary of version {version} has log-probabilities that are not finite")
    return Canary(token_ids=token_ids, logprobs=logprobs, tolerance=tolerance)


def canary_error(canary: Canary, logprobs: Float32Array) -> float:
    """Return the mean absolute difference from the trainer's log-probabilities; infinite if they cannot be compared.

    The mean is used because in 16 bits one unlikely token may be off by half a nat even under the right weights, while
    wrong weights change all tokens.
    """
    scored = np.asarray(logprobs, np.float32)
    if scored.shape != canary.logprobs.shape or not np.isfinite(scored).all():
        return float("inf")
    return float(np.abs(scored - canary.logprobs).mean()) if len(scored) else 0.0


class Tolerance:
    """One engine's limit for canary errors. It grows with the size of the log-probabilities, as rounding does."""

    def __init__(self) -> None:
        self._found: float | None = None
        """The calibrated limit for log-probabilities of size 1."""

    def of(self, canary: Canary) -> float:
        """Return the limit for this version's canary."""
        if canary.tolerance is not None:
            return canary.tolerance
        return LARGEST_FIRST_ERROR if self._found is None else max(SMALLEST_TOLERANCE, self._found * _size(canary))

    def proved(self, canary: Canary, error: float) -> None:
        """Record that a version was proved with this error; the first proved version calibrates the limit."""
        if self._found is None:
            self._found = HEADROOM * error / _size(canary)


def _size(canary: Canary) -> float:
    return max(1.0, float(np.abs(canary.logprobs).mean())) if len(canary.logprobs) else 1.0
