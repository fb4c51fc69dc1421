"""Transports carry packed weights: `base` is the protocol, and every transport has its own file.

A name means the class `Transport` in the module of that name. A reference (`module:attribute`) means a user's own
class. Torch is not loaded until a transport is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from headrace.delivery.transports.base import SenderSettings, SourceSettings
from headrace.errors import DeliveryError
from headrace.reference import call_factory, import_function

if TYPE_CHECKING:
    from headrace.delivery.transports.base import Sender, Source, Transport

End = TypeVar("End")

NAMES = ("shm", "file", "tcp", "cuda_ipc", "nccl")
WITHOUT_GPU = ("shm", "file", "tcp", "nccl")
"""The transports that run on a host without a GPU; there `nccl` broadcasts with gloo."""


def _opened(name: str, open_end: Callable[[Transport], End]) -> End:
    """Open one end of the transport of this name; an error in a user's own transport is reported in one line."""
    if name in NAMES:
        return open_end(import_function(f"{__name__}.{name}:Transport")())
    if ":" not in name:
        raise DeliveryError(f"there is no transport {name!r}: one of {', '.join(NAMES)}")
    made: End = call_factory(f"[delivery] transport: {name}", lambda: open_end(import_function(name)()))
    return made


def sender(name: str, settings: SenderSettings) -> Sender:
    """Make the trainer's end of the transport of this name or reference."""
    made = _opened(name, lambda transport: transport.sender(settings))
    made.name = name
    return made


def source(name: str, *, keys: Path | None = None, device: str = "cpu") -> Source:
    """Make an engine's end of the transport of this name or reference; `SourceSettings` explains the arguments."""
    settings = SourceSettings(keys=keys, device=device)
    return _opened(name, lambda transport: transport.source(settings))
