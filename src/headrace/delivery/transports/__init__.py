"""How packed weights travel: `base` is the protocol, one file per transport, chosen by name with `sender`, `source`.

No torch is loaded until a transport is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import DeliveryError

if TYPE_CHECKING:
    from headrace.delivery.transports.base import Sender, Source

NAMES = ("shm", "file", "tcp")


def sender(
    name: str,
    run_id: str,
    *,
    directory: Path | None = None,
    keep: int = 2,
    bind: str = "127.0.0.1",
    keys: Path | None = None,
) -> Sender:
    """The trainer's end of the transport of this name.

    `run_id` marks what `shm` leaves on the machine; `directory` and `keep` are those of `file`, `bind` and `keys` (the
    file with the keys of the run) those of `tcp`.
    """
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSender

        return ShmSender(run_id)
    if name == "file":
        from headrace.delivery.transports.file import FileSender

        if directory is None:
            raise DeliveryError("the file transport needs a directory")
        return FileSender(directory, keep=keep)
    if name == "tcp":
        from headrace.delivery.transports.tcp import TcpSender

        return TcpSender(bind=bind, keys=keys)
    raise _unknown(name)


def source(name: str, *, keys: Path | None = None) -> Source:
    """An engine's end of the transport of this name; `keys` is the file with the keys of the run."""
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSource

        return ShmSource()
    if name == "file":
        from headrace.delivery.transports.file import FileSource

        return FileSource()
    if name == "tcp":
        from headrace.delivery.transports.tcp_source import TcpSource

        return TcpSource(keys=keys)
    raise _unknown(name)


def _unknown(name: str) -> DeliveryError:
    return DeliveryError(f"there is no transport {name!r}: one of {', '.join(NAMES)}")
