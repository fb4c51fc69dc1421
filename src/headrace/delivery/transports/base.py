"""The transport protocol: the trainer writes a version once, every engine reads it, nobody reads two versions mixed.

A transport makes a `Sender` in the trainer and a `Source` in every engine. `tests/contract/test_transport.py` holds
what every implementation must keep. `[delivery] transport = "mine.py:Mine"` names one of the user's own, the smallest
of which is:

    class Mine(Stored):
        def write(self, version, plan, weights):
            ...  # Store the weights, cast to the plan's dtypes, and return where they are.

        def open(self, location, version, entries):
            ...  # Read them again, by name.

        def release(self, location):
            ...  # Nobody needs them any more.

What others must know about a transport stands in its class as literals, because the controller reads them without
importing the file: `headrace.config.declared.TransportFacts` says which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headrace.types import NO_VERSION

if TYPE_CHECKING:
    import torch

    from headrace.delivery.base import Entry
    from headrace.delivery.plan import PackingPlan


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """What a trainer's end may be told; a transport takes what concerns it."""

    run_id: str
    """Marks what the transport leaves on the machine."""
    directory: Path | str | None = None
    """A folder of the run's own for files: a path, or a URL for fsspec. Every rank of a trainer has another one."""
    keep: int = 2
    """How many of the newest versions' files stay."""
    owner: str = ""
    """The run, as other hosts know it."""
    bind: str = "127.0.0.1"
    """The address to listen on."""
    keys: Path | None = None
    """The file with the keys of the run, which is there if the transport `uses_keys` and `bind` is not loopback."""
    device: str = "cpu"
    """Where the trainer's weights are."""
    receivers: int = 1
    """How many engines there are."""
    relays: bool = True
    """Whether engines may hand a version on to each other."""
    per_parameter: bool = False
    """Send tensor by tensor, not the packed bytes."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """What an engine's end may be told."""

    keys: Path | None = None
    """The file with the keys of the run."""
    device: str = "cpu"
    """Where the engine's weights are."""


class Transport(Protocol):
    """A way for weights to travel. The class is called without arguments, in every process that sends or receives."""

    def sender(self, settings: SenderSettings, /) -> Sender:
        """The trainer's end."""
        ...

    def source(self, settings: SourceSettings, /) -> Source:
        """An engine's end."""
        ...


class Sender(Protocol):
    """The trainer's end. It holds at most two versions at a time. All methods may be called from any thread."""

    name: str
    """The transport's name or reference, by which a manifest tells engines what to open; set by whoever makes it."""

    def wait(self, version: int, timeout: float) -> None:
        """Wait until there is a place to write this version.

        Raises `DeliveryError`, naming the versions that hold the places, after `timeout` seconds.
        """
        ...

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights, cast to the plan's dtypes, and return their location; the caller may change its own then.

        On a GPU the copy is enqueued on the current stream, and what the caller does there comes after it.
        Raises `DeliveryError` when there is no place.
        """
        ...

    def finish(self, location: str) -> None:
        """Make what was written readable; nobody opens the location before.

        Called by a thread of the publisher's while the trainer goes on. Raises `DeliveryError` when it cannot be done.
        """
        ...

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """What was really written there, as views; valid after `finish` and until `release`.

        On a GPU they are there for what comes next on the current stream.
        """
        ...

    def release(self, location: str) -> None:
        """Nobody reads this location any more: its place may be used again. Idempotent."""
        ...

    def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        ...


@runtime_checkable
class Enqueuing(Protocol):
    """A sender on whose `write` other work of the same GPU can follow at once, before `finish`."""

    def follow(self, location: str) -> None:
        """What comes next on the current stream comes after what was written there."""
        ...


class Source(Protocol):
    """An engine's end. Used by one thread at a time."""

    private: bool
    """Whether `open` gives memory of this source's own, which nothing changes before the next `open`. Otherwise it is
    the trainer's, and whoever reads it checks with `verify` that it was not written again."""

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Views of a version's tensors, not to be written to; on a GPU for what comes next on the current stream.

        Raises `DeliveryError` when the location is gone, too small, or does not hold all of exactly this version.
        """
        ...

    def verify(self, location: str, version: int) -> None:
        """Raise `DeliveryError` unless the location still holds this version: what was copied since `open` is whole.

        A copy on a GPU must be done, not only enqueued.
        """
        ...

    def close(self) -> None:
        """Let go of every location. Idempotent."""
        ...


class Stored(ABC):
    """The base of a transport that stores every version under a location of its own, and has room for any number.

    An instance is the transport, and both of its ends: the trainer's process has one, and every engine's.
    """

    private = True
    name = ""
    settings = SenderSettings(run_id="")
    """Of the trainer's end."""

    def sender(self, settings: SenderSettings, /) -> Sender:
        """See `Transport.sender`."""
        self.settings = settings
        return self

    def source(self, settings: SourceSettings, /) -> Source:
        """See `Transport.source`."""
        return self

    @abstractmethod
    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """See `Sender.write`."""

    @abstractmethod
    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """See `Source.open`; the trainer opens what it has written too, with `NO_VERSION`."""

    @abstractmethod
    def release(self, location: str) -> None:
        """See `Sender.release`."""

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """See `Sender.snapshot`."""
        return self.open(location, NO_VERSION, plan.entries)

    def wait(self, version: int, timeout: float) -> None:  # noqa: B027
        """See `Sender.wait`: there is always a place."""

    def finish(self, location: str) -> None:  # noqa: B027
        """See `Sender.finish`."""

    def verify(self, location: str, version: int) -> None:  # noqa: B027
        """See `Source.verify`: what was opened is memory of this process."""

    def close(self) -> None:  # noqa: B027
        """See `Sender.close`."""


@runtime_checkable
class PredictsPlaces(Protocol):
    """A source that knows where later versions will lie."""

    def upcoming(self, entries: Sequence[Entry]) -> list[dict[str, torch.Tensor]]:
        """Views of the places that became known since this was last asked, other than the one that was opened.

        What is in them is nothing yet: they are there to be prepared for.
        """
        ...


@runtime_checkable
class Relaying(Protocol):
    """A source through which engines may have a version from each other, none of which is trusted."""

    @property
    def relayed(self) -> bool:
        """Whether what `open` gave last came from another engine and is unproved: `open` again asks the trainer."""
        ...

    def share(self, location: str, version: int) -> None:
        """What `open` gave last was proved: others may have it from here until the next `open`."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A source in whose own memory a version fills up from its first packed byte."""

    def open_growing(
        self,
        location: str,
        version: int,
        entries: Sequence[Entry],
        grown: Callable[[Mapping[str, torch.Tensor], int], None],
    ) -> dict[str, torch.Tensor]:
        """`open`, which tells meanwhile how many bytes from the beginning are in place and are not written again.

        `grown` gets the views that are returned in the end, and is called by this thread, in the end for all bytes.
        """
        ...
