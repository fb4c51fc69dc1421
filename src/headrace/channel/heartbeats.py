"""Heartbeats: a process says that it lives, what it is doing, and what it did since the last beat."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.observe.spans import TimeSpan

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 20.0
"""A peer not heard for this long is taken for dead. (A local process's exit is noticed at once, by its launcher.)"""


class Hello(Message):
    """The first message of a worker."""

    pid: int


class Heartbeat(Message):
    """Sent by a thread of its own, so that a long step or a compile does not look like death."""

    phase: str
    """loading, ready, stepping, ..."""
    time: float
    """The sender's `time.monotonic()`."""
    spans: list[TimeSpan] = []
    generated_tokens: int = 0
    """Since the last beat (engines)."""
    peak_memory_bytes: int = 0
    """The most of a GPU's memory that the sender has held so far."""


class Alive(Message):
    """The controller's beat: a worker that does not hear it ends itself, so no orphan stays."""


class Ready(Message):
    """A worker has loaded what it needs and serves from now on."""

    facts: dict[str, int | float | str] = {}


class Stop(Message):
    """The controller asks a worker to end in good order."""
