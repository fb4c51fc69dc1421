"""The transport protocol: the trainer writes a version once, every engine reads it, nobody reads two versions mixed.

A transport makes a `Sender` in the trainer and a `Source` in every engine. A *place* holds the bytes of one version at
a time (a shared-memory segment, a file, a GPU buffer); its *location* is the string by which engines find the place.
`tests/contract/test_transport.py` tests what every implementation must guarantee. A user's own transport is named by
`[delivery] transport = "mine.py:Mine"`; the smallest one is:

    class Mine(Stored):
        def write(self, version, plan, weights):
            ...  # Store the weights, cast to the plan's dtypes, and return where they are.

        def open(self, location, version, entries):
            ...  # Read them again, by name.

        def release(self, location):
            ...  # Nobody needs them any more.

The class declares its properties (does it need a GPU, does it cross hosts) as literals, because the controller reads
them without importing the file. `headrace.config.declared.TransportFacts` lists them.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headrace.errors import DeliveryError
from headrace.types import NO_VERSION

if TYPE_CHECKING:
    import torch

    from headrace.delivery.base import Entry
    from headrace.delivery.plan import PackingPlan

LIMIT = 2
"""The number of places: one for the version that engines read, and one that the trainer writes meanwhile."""
ReadSpan = Callable[[int, memoryview], None]
"""A function that fetches packed bytes of a version: from this offset on, until the memory is full."""


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """The settings of the trainer's end. A transport uses only the settings that it needs."""

    run_id: str
    """A name that marks everything the transport creates on the host."""
    directory: Path | str | None = None
    """A folder for the files of this run: a path, or a URL for fsspec. Every rank of a trainer has its own folder."""
    keep: int = 2
    """The number of newest versions whose files are kept."""
    owner: str = ""
    """A name of the run that is unique across hosts."""
    bind: str = "127.0.0.1"
    """The address to listen on."""
    keys: Path | None = None
    """The file with the keys of the run. It exists if the transport `uses_keys`."""
    device: str = "cpu"
    """The device of the trainer's weights."""
    receivers: int = 1
    """The number of engines."""
    trusted_network: bool = False
    """Whether a transport without keys may listen beyond loopback."""
    relays: bool = True
    """Whether engines may relay a version to each other."""
    per_parameter: bool = False
    """Whether to send tensor by tensor instead of the packed bytes."""


@dataclass(frozen=True, kw_only=True)
class SourceSettings:
    """The settings of an engine's end."""

    keys: Path | None = None
    """The file with the keys of the run."""
    device: str = "cpu"
    """The device of the engine's weights."""


class Transport(Protocol):
    """A way for weights to travel. The class is called without arguments, in every process that sends or receives."""

    def sender(self, settings: SenderSettings, /) -> Sender:
        """Make the trainer's end."""

    def source(self, settings: SourceSettings, /) -> Source:
        """Make an engine's end."""


class Sender(Protocol):
    """The trainer's end. It holds at most two versions at a time. All methods may be called from any thread."""

    name: str
    """The transport's name or reference. A manifest carries it, so that engines open the same transport. The code that
    makes the sender sets this attribute."""

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free place. After `timeout` seconds, raise `DeliveryError` naming the versions in the places."""

    @abstractmethod
    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights, cast to the plan's dtypes, and return the location of the copy.

        The caller may change its weights after this returns. On a GPU the copy is enqueued on the current stream, and
        later work of the caller on this stream runs after the copy. Raises `DeliveryError` if there is no free place.
        """

    def finish(self, location: str) -> None:
        """Make the written version readable; nobody opens the location before this returns.

        A thread of the publisher calls this while the trainer continues. Raises `DeliveryError` on failure.
        """

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of the bytes that were really written; they are valid after `finish` and until `release`.

        On a GPU the views are valid for work that is enqueued on the current stream from now on.
        """

    @abstractmethod
    def release(self, location: str) -> None:
        """Allow the place to be used again, because nobody reads this location any more. Idempotent."""

    def close(self) -> None:
        """Remove everything that this sender created. Idempotent."""


@runtime_checkable
class Enqueuing(Protocol):
    """A sender that only enqueues its copy, so that other work of the same GPU can follow `write` before `finish`."""

    def follow(self, location: str) -> None:
        """Make later work on the current stream wait until the place is written."""


class Source(Protocol):
    """An engine's end. Used by one thread at a time."""

    private: bool
    """Whether `open` returns memory of this source, which does not change before the next `open`. If False, the memory
    is the trainer's, and the reader must call `verify` after reading to check that it was not overwritten."""

    @abstractmethod
    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Return views of a version's tensors, which must not be written to.

        On a GPU the views are valid for work that is enqueued on the current stream from now on. Raises
        `DeliveryError` if the location is gone, too small, or does not hold exactly this version, complete.
        """

    def verify(self, location: str, version: int) -> None:
        """Raise `DeliveryError` unless the location still holds this version.

        If this returns, everything that was copied since `open` is from this version. Copies on a GPU must have
        finished before the call, not only been enqueued.
        """

    def close(self) -> None:
        """Close every opened location. Idempotent."""


class Stored(Sender, Source):
    """The base class of a transport that stores every version under a new location and has room for any number.

    An instance is the transport and also its end: the trainer's process has one instance, and so has every engine's.
    The trainer also calls `open` to read its own copy, with `NO_VERSION` as the version. `wait`, `finish`, `verify` and
    `close` do nothing: there is always a free place, and `open` gives memory of its own process.
    """

    private = True
    name = ""
    settings = SenderSettings(run_id="")

    def sender(self, settings: SenderSettings, /) -> Sender:
        """See `Transport.sender`."""
        self.settings = settings
        return self

    def source(self, settings: SourceSettings, /) -> Source:
        """See `Transport.source`."""
        return self

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """See `Sender.snapshot`."""
        return self.open(location, NO_VERSION, plan.entries)


class PlacedSender(ABC):
    """The base class of a sender with a few places of its own.

    At most two versions hold a place at a time, each from its write until its release. A place that is held is not
    given to another version. See `Sender` for the methods.
    """

    name = ""

    def __init__(self, noun: str, owner: str = "transport") -> None:
        """Create a sender; `noun` is what errors call a place, and `owner` is what they call its owner."""
        self._noun = noun
        self._owner = owner
        self._holders: dict[str, tuple[int, float]] = {}
        """By location: the version that holds the place, and since when."""
        self._released = threading.Condition()
        self._ended = False

    def wait(self, version: int, timeout: float) -> None:
        """See `Sender.wait`."""
        with self._released:
            if not self._released.wait_for(self._has_room, timeout) or self._ended:
                raise self._no_place(version)

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """See `Sender.write`. The place is released if the copy fails."""
        with self._released:
            if self._ended or not self._has_room():
                raise self._no_place(version)
            location = self._choose(version, plan.nbytes, self._holders.keys())
            self._holders[location] = version, time.monotonic()
        with ExitStack() as undo:
            undo.callback(self.release, location)
            self._fill(location, version, plan, weights)
            undo.pop_all()
        return location

    def finish(self, location: str) -> None:  # noqa: B027
        """See `Sender.finish`. Most places are readable as soon as they are written."""

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """See `Sender.snapshot`. Raises `DeliveryError` if nothing was written there, or it was released."""
        self._check_held(location)
        return self._views(location, plan)

    def release(self, location: str) -> None:
        """See `Sender.release`."""
        with self._released:
            self._holders.pop(location, None)
            self._released.notify_all()

    def close(self) -> None:
        """Free all places; threads that wait or come later get a `DeliveryError`. See `Sender.close`."""
        with self._released:
            self._ended = True
            self._holders.clear()
            self._released.notify_all()

    @abstractmethod
    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
        """Return the location for a version of this size: none of those that are held already."""

    @abstractmethod
    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights to a location that this version holds."""

    @abstractmethod
    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of what was written to a location that is held."""

    def _holds(self, location: str) -> bool:
        with self._released:
            return location in self._holders

    def _check_held(self, location: str) -> None:
        if not self._holds(location):
            raise DeliveryError(f"{self._noun} {location} holds nothing")

    def _has_room(self) -> bool:
        return self._ended or len(self._holders) < LIMIT

    def _no_place(self, version: int) -> DeliveryError:
        if self._ended:
            return DeliveryError(f"no {self._noun} for version {version}: the {self._owner} is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held} ({now - since:.1f} s)" for held, since in self._holders.values())
        return DeliveryError(f"no {self._noun} for version {version}: not acknowledged by the engines: {holders}")


@runtime_checkable
class PredictsPlaces(Protocol):
    """A source that knows the places of later versions."""

    def upcoming(self, entries: Sequence[Entry]) -> list[dict[str, torch.Tensor]]:
        """Return views of the places that became known since the last call, other than the opened place.

        The contents of these views have no meaning yet. The caller only prepares for versions that arrive there.
        """


@runtime_checkable
class Relaying(Protocol):
    """A source that can fetch a version from another engine and relay it to others. No relay is trusted."""

    @property
    def relayed(self) -> bool:
        """Whether the version that was opened last came from another engine and is not proved yet.

        If so, opening it again fetches it from the trainer.
        """

    def share(self, location: str, version: int) -> None:
        """Offer the version that was opened last, and is proved now, to other engines until the next `open`."""


@runtime_checkable
class Growing(Protocol):
    """A source with its own memory, which a version fills from the first packed byte to the last."""

    def open_growing(
        self,
        location: str,
        version: int,
        entries: Sequence[Entry],
        grown: Callable[[Mapping[str, torch.Tensor], int], None],
    ) -> dict[str, torch.Tensor]:
        """Do what `open` does, and report progress through `grown` while bytes arrive.

        `grown` gets the views that are returned at the end, and the number of bytes from the beginning that are final.
        It is called in the calling thread, the last time with all bytes.
        """


@runtime_checkable
class Spanning(Protocol):
    """A source with its own memory that can also fetch a version span by span, without memory for the whole version."""

    def spans(self, location: str, version: int, entries: Sequence[Entry]) -> AbstractContextManager[ReadSpan]:
        """Return a context with a function that fetches spans of a version. Spans are aligned like tensors.

        All spans are of the same write, which `verify` confirms after the context has ended. The context or the
        function raises `DeliveryError` if the location is gone or does not hold exactly this version.
        """
