"""All exceptions of Headrace, in one tree.

    HeadraceError
    ├── UserError            a mistake in the user's input: one line, exit code 2
    │   ├── ConfigError      a wrong value in the configuration (names the `[section] key`)
    │   ├── DataError        a wrong data file (names the file and the line)
    │   ├── ModelError       a model directory that cannot be used, or would be served wrongly
    │   ├── DiskError        a disk that cannot be written any more
    │   └── RunFinished      a run that has nothing left to do
    ├── ChannelError         a message could not be sent, decoded or answered
    │   ├── DeadlineError    no answer came in time (names who waited for whom)
    │   ├── HttpError        a server answered with an error (carries its status)
    │   └── PeerDied         the other side is gone (carries its last lines)
    ├── DeliveryError        weights were rejected, or not proved
    │   └── WrongBase        a delta of weights whose base the receiver does not hold
    └── StallError           the pipeline made no progress (names who waits for what)

A failed rollout is not an exception: it is a `Rollout` with `ending = "failed"` and a reason.
"""

LINE_LENGTH = 500


def one_line(text: str, limit: int = LINE_LENGTH) -> str:
    """Return foreign text as one line that is safe to log and to show, of at most `limit` characters.

    Control characters and escape sequences become visible, and a longer text is cut with "…".
    """
    # Cut first: the text may be huge, and each of its characters can become at most ten.
    text = " ".join(text[: limit + 1].split()) + ("…" if len(text) > limit + 1 else "")
    shown = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return shown if len(shown) <= limit else f"{shown[: limit - 1]}…"


class HeadraceError(Exception):
    """The root of all exceptions that Headrace raises on purpose."""


class UserError(HeadraceError):
    """A mistake in the user's input. The text is one line that says what would be right."""


class ConfigError(UserError):
    """A wrong value in the configuration."""


class DataError(UserError):
    """A wrong data file. The text names the file and the line."""


class ModelError(UserError):
    """A model directory that cannot be used."""


class DiskError(UserError):
    """A disk that cannot be written any more. The user's input is not wrong; everything written before is intact."""


class RunFinished(UserError):
    """A run that is to go on has all its versions. The text says how to train more."""


class ChannelError(HeadraceError):
    """A message could not be sent, decoded or answered."""


class DeadlineError(ChannelError):
    """No answer came in time."""


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
    """A delta of weights whose base version the receiver does not hold."""


class StallError(HeadraceError):
    """The pipeline made no progress."""


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that a person should read: the first one of Headrace's own, or else the first one."""
    found: BaseException = failures.subgroup(HeadraceError) or failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
