"""Heartbeats: a process says that it is alive, what it is doing, and what it did since its last heartbeat."""

from headrace.channel.codec import Message
from headrace.observe.spans import TimeSpan

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 20.0
"""A peer that sends nothing for this many seconds is declared dead. The launcher notices the exit of a local process at
once, without this timeout."""


def identity(name: str, epoch: int) -> str:
    """Return the name under which the process of this epoch connects."""
    return f"{name}/{epoch}" if epoch else name


class Hello(Message):
    """The first message of a worker."""

    protocol: int = 0
    """The worker's `PROTOCOL`. A worker that does not know the field is of an older version."""
    without_files: bool = False
    """Whether the worker has no run directory. It then waits for a `Welcome`."""


class Welcome(Message):
    """The answer to `Hello` for a worker that has no run directory: everything that it starts from."""

    run: str
    """The name of the run."""
    token: str
    """The name of this start of the run. Workers on one host that have the same token share a directory."""
    files: dict[str, bytes]
    """What the run directory holds that the worker needs, by file name."""
    silence_seconds: float
    """The worker ends if it hears nothing for so long."""
    last_step: int | None = None
    """The last step that the journal has, for a trainer."""
    checkpoints: bool = False
    """Whether the controller keeps the checkpoints, for a trainer: it sends the newest one now (see `channel.files`),
    and reads every new one."""


class Refused(Message):
    """The controller has started another process in the place of this one, which must end."""

    reason: str


class LogText(Message):
    """What a worker on another host has written to its log since the last time."""

    text: str


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


class MeetingPoint(Message):
    """The first trainer rank says where it waits for the others. The controller passes this on to those that ask."""

    host: str
    port: int


class MeetingRequest(Message):
    """A trainer rank asks where the first rank waits. It is sent a `MeetingPoint` once that is known."""


class FailureReason(Message):
    """A worker says why it ends. Its log says so too, unless the disk is full."""

    reason: str


class Stop(Message):
    """The controller asks a worker to shut down cleanly."""
