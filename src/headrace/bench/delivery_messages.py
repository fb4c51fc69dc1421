"""The messages between a delivery benchmark and the processes of its engines, and the protocol of such an engine."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Staged


class Enter(msgspec.Struct, kw_only=True):
    """The first message to an engine's process: which model to load, and how."""

    name: str
    model: str
    dtype: str
    device: str
    seed: int
    threads: int
    adapter: bool
    decode: int
    """The number of sequences to decode all the time; 0 if the engine only holds weights."""


class Entered(msgspec.Struct, kw_only=True):
    """The answer to `Enter`: the model is loaded."""


class Take(msgspec.Struct, kw_only=True):
    """The request to make this version the live one."""

    manifest: Manifest


class Taken(msgspec.Struct, kw_only=True):
    """The answer to `Take`: the proof, and how long each part took.

    Fields that end in `_at` are times of the monotonic clock, which all processes of a host share.
    """

    proof: Proof
    fetch_seconds: float
    stage_seconds: float
    """The time to fetch and check the version. It includes `fetch_seconds`."""
    swap_seconds: float
    """The time of the copy over the live weights and of their digest. For a decoding engine: the time by which the swap
    delayed its steps."""
    canary_seconds: float
    """The time to score the canary; 0 for a decoding engine, which scores it beside its steps."""
    proved_at: float
    """When the version was proved. For an engine that only holds weights, the canary is not included."""
    received_at: float = 0.0
    """When the engine's process received the manifest."""
    staged_at: float = 0.0
    install_began_at: float = 0.0
    installed_at: float = 0.0
    """When the copy was launched. It runs after the steps that were launched before it."""
    last_token_at: float = 0.0
    """When the host got the last token of the old version; at least `installed_at`."""
    first_token_at: float = 0.0
    """When the host got the first token of the new version."""
    step_seconds: float = 0.0
    """The mean time of a decode step since the delivery before."""


class BenchEngine(Protocol):
    """The engine in a process of the benchmark."""

    def stage(self, manifest: Manifest) -> Staged:
        """Fetch and check a version. This is called in another thread than the other methods."""
        ...

    def take(self, staged: Staged) -> Taken:
        """Make the staged weights live, prove them, and return the measured times."""
        ...

    def turn(self) -> None:
        """Do some work while no version is staged. This is called again and again if the engine decodes."""
        ...

    def close(self) -> None:
        """Release what deliveries hold."""
        ...
