"""Heartbeats: a process says that it is alive, what it is doing, and what it did since its last heartbeat."""

from headrace.channel.codec import Message
from headrace.observe.spans import TimeSpan

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 20.0
"""A peer that sends nothing for this many seconds is declared dead. The launcher notices the exit of a local process at
once, without this timeout."""


class Hello(Message):
    """The first message of a worker."""

    protocol: int = 0
    """The worker's `PROTOCOL`. A worker that does not know the field is of an older version."""


class Heartbeat(Message):
    """A worker's heartbeat. A separate thread sends it, so that a long step or a compile does not look like death."""

    phase: str
    """What the worker is doing: loading, ready, stepping, ..."""
    time: float
    """The time on the sender's `time.monotonic()`."""
    spans: list[TimeSpan] = []
    generated_tokens: int = 0
    """The number of tokens generated since the last heartbeat (engines only)."""
    peak_memory_bytes: int = 0
    """The peak GPU memory that the sender has held so far, in bytes."""


class Alive(Message):
    """The controller's heartbeat. A worker that no longer receives it exits, so no orphan process remains."""


class Ready(Message):
    """A worker has loaded everything that it needs and serves from now on."""

    facts: dict[str, int | float | str] = {}


class FailureReason(Message):
    """A worker says why it ends. Its log says so too, unless the disk is full."""

    reason: str


class Stop(Message):
    """The controller asks a worker to shut down cleanly."""
