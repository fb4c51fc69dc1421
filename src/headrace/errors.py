"""One exception tree.

    HeadraceError
    ├── UserError            a mistake in what the user gave: one line, exit code 2
    │   ├── ConfigError      a value of the configuration (says which `[section] key`)
    │   ├── DataError        a file of theirs (says which file, which line)
    │   ├── ModelError       a model directory that cannot be used, or would be served wrongly
    │   └── DiskError        a disk that takes no more
    ├── ChannelError         a message could not be sent, decoded or answered
    │   ├── DeadlineError    nobody answered in time (says who waited for whom)
    │   ├── HttpError        a server answered with an error (carries its status)
    │   └── PeerDied         the other side is gone (carries its last lines)
    ├── DeliveryError        weights were rejected, or not proved
    └── StallError           the pipeline made no progress (says who waits for what)

A failed rollout is not an exception: it is a `Rollout` with `ending = "failed"` and a reason.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """The root of everything Headrace raises on purpose."""


class UserError(HeadraceError):
    """A mistake in what the user gave; its text is one line that says what would be right."""


class ConfigError(UserError):
    """A value of the configuration."""


class DataError(UserError):
    """A data file: the text names the file and the line."""


class ModelError(UserError):
    """A model directory that cannot be used."""


class DiskError(UserError):
    """A disk that takes no more: nothing that was given is wrong, and what was written before is good."""


class ChannelError(HeadraceError):
    """A message could not be sent, decoded or answered."""


class DeadlineError(ChannelError):
    """Nobody answered in time."""


class HttpError(ChannelError):
    """A server answered with an error."""

    def __init__(self, url: str, status: int, reason: str) -> None:
        super().__init__(f"{url} answered {status}: {reason}")
        self.status = status
        self.reason = reason


class PeerDied(ChannelError):
    """The other side of a channel is gone."""

    def __init__(self, peer: str, reason: str, last_lines: str = "") -> None:
        super().__init__(f"{peer} died: {reason}")
        self.peer = peer
        self.reason = reason
        self.last_lines = last_lines


class DeliveryError(HeadraceError):
    """Weights were rejected, or could not be proved."""


class WrongBase(DeliveryError):
    """A change to weights that the receiver does not hold."""


class StallError(HeadraceError):
    """The pipeline made no progress."""
