"""How packed weights travel: `base` is the protocol, one file per transport, chosen by name with `sender`, `source`.

No torch is loaded until a transport is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import DeliveryError

if TYPE_CHECKING:
    from headrace.delivery.transports.base import Sender, Source

NAMES = ("shm",)


def sender(name: str, run_id: str) -> Sender:
    """The trainer's end of the transport of this name; `run_id` marks what it leaves on the machine."""
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSender

        return ShmSender(run_id)
    raise _unknown(name)


def source(name: str) -> Source:
    """An engine's end of the transport of this name."""
    if name == "shm":
        from headrace.delivery.transports.shm import ShmSource

        return ShmSource()
    raise _unknown(name)


def _unknown(name: str) -> DeliveryError:
    return DeliveryError(f"there is no transport {name!r}: one of {', '.join(NAMES)}")
