"""What a delivery benchmark and the processes of its engines say to each other, and what such an engine does."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Staged


class Enter(msgspec.Struct, kw_only=True):
    """The first message: which model to hold, and how."""

    name: str
    model: str
    dtype: str
    device: str
    seed: int
    threads: int
    adapter: bool
    decode: int


class Entered(msgspec.Struct, kw_only=True):
    """The model is there."""


class Take(msgspec.Struct, kw_only=True):
    """Make this version the live one."""

    manifest: Manifest


class Taken(msgspec.Struct, kw_only=True):
    """It is, and what it took. Moments are of the monotonic clock that the processes of a host share."""

    proof: Proof
    fetch_seconds: float
    stage_seconds: float
    """Fetching included."""
    swap_seconds: float
    """The copy over the live weights and their digest; of a decoding engine all that its steps waited for."""
    canary_seconds: float
    """0 where it ran beside decoding."""
    proved_at: float
    """Without the canary, where that was scored apart."""
    received_at: float = 0.0
    """When the engine's process had the manifest."""
    staged_at: float = 0.0
    install_began_at: float = 0.0
    installed_at: float = 0.0
    """When the copy was launched, behind what was under way."""
    last_token_at: float = 0.0
    """When the host knew the last token of the old version; not before `installed_at`."""
    first_token_at: float = 0.0
    """When the host first knew a token of the new version."""
    step_seconds: float = 0.0
    """Of a decode step, in the mean over those since the delivery before."""


class BenchEngine(Protocol):
    """What a process of the benchmark does with manifests."""

    def stage(self, manifest: Manifest) -> Staged:
        """Fetch and check; in a thread of its own."""
        ...

    def take(self, staged: Staged) -> Taken:
        """Swap and prove."""
        ...

    def turn(self) -> None:
        """What is done while nothing arrives."""
        ...

    def close(self) -> None:
        """Let go of what deliveries hold."""
        ...
