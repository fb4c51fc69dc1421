"""The trainer's end of the `tcp` transport: it serves byte ranges of two snapshots in memory to any number of engines.

A snapshot is not overwritten before it is released, and every reply names the write that its bytes come from. If there
are many engines, they fetch in a tree: the trainer serves FAN_OUT engines, and each engine that has the version serves
FAN_OUT others. The trainer serves every engine that asks it for bytes, whatever the tree says.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from headrace.delivery.copying import copy_all
from headrace.delivery.plan import PackingPlan, Views
from headrace.delivery.transports.base import Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.places import LIMIT, PlacedSender
from headrace.delivery.transports.tcp_server import HeldBytes, ServedMemory, WeightServer
from headrace.delivery.transports.tcp_source import TcpSource
from headrace.delivery.transports.tcp_wire import MemorySlice, ReadReply, ReadRequest, is_loopback
from headrace.errors import ConfigError, DeliveryError

FAN_OUT = 2
"""How many engines each parent serves. A level of the tree takes FAN_OUT copies, and the number of levels is the
logarithm of the number of engines to this base. So 2 and 3 are the fastest, and 2 sends least from the trainer."""
TREE_ABOVE = 2 * FAN_OUT
"""Up to this many engines all fetch from the trainer, because a second level would not serve so few any sooner."""
SILENCE = 10.0
"""After this many seconds of silence, an engine that fetches is no longer waited for."""

TRAINER = ""
"""The trainer as a parent; it is always available."""


class _Snapshot(HeldBytes):
    """One place of the sender, and the tree of the engines that fetch its version."""

    def __init__(self) -> None:
        super().__init__()
        self.hold(0)
        self.tree = Tree()

    def hold(self, nbytes: int) -> None:
        """Replace the memory by memory of this size."""
        self._memory = ServedMemory(nbytes)
        self.buffer = self._memory.bytes
        self.views = Views(self.buffer)

    def payload(self, start: int, stop: int) -> MemorySlice:
        """Return the bytes in place; the slice keeps the memory alive, and `sequence` shows if it was overwritten."""
        return self._memory.part(start, stop)


class TcpSender(PlacedSender, WeightServer):
    """The trainer's end, a server that runs from its creation until `close`."""

    name = "tcp"

    def __init__(self, *, bind: str = "127.0.0.1", keys: Path | None = None, receivers: int = 1) -> None:
        """Start the server on `bind`, an address of this host.

        If that is not loopback, `keys` must be the file with the keys of the run. `receivers` is the number of engines
        that fetch each version; more than `TREE_ABOVE` engines form a tree.
        """
        self.sent_bytes = 0
        """The bytes of weights that this sender has sent since it was made."""
        PlacedSender.__init__(self, "snapshot")
        self._snapshots = [_Snapshot() for _ in range(LIMIT)]
        self._sequence = 0
        run_keys = None if is_loopback(bind) else read_keys(keys)
        try:
            WeightServer.__init__(self, self._snapshots, bind, run_keys)
        except OSError as error:
            raise ConfigError(f"[delivery] bind: cannot listen on {bind}: {error.strerror}") from error
        tree = receivers > TREE_ABOVE
        self._locations = [str(self._server.location(place, tree=tree)) for place in range(LIMIT)]

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights into a free snapshot; see `Sender.write`."""
        with self._places.filling(version, self._free, self.release) as location:
            place = self._at(location)
            with self._lock:
                self._sequence += 1
                place.whole, place.version, place.sequence = False, version, self._sequence
                place.tree = Tree()
                if len(place.buffer) != plan.nbytes:
                    place.hold(plan.nbytes)
            with torch.no_grad():
                copy_all(place.views.of(plan.entries), weights)
            with self._lock:
                place.whole = True
        return location

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of a snapshot that was written and not released."""
        if not self._places.holds(location):
            raise DeliveryError(f"snapshot {location} holds nothing")
        return self._at(location).views.of(plan.entries)

    def release(self, location: str) -> None:
        """Stop serving the snapshot and allow it to be overwritten."""
        with self._lock:
            self._at(location).whole = False
        super().release(location)

    def close(self) -> None:
        """Stop serving, and release the port and the memory."""
        self._places.close()
        self._server.close()
        self._snapshots[:] = [_Snapshot() for _ in range(LIMIT)]

    def _header(self, held: HeldBytes, ask: ReadRequest) -> ReadReply:
        """See `WeightServer._header`. In a tree, the reply also says from whom to fetch."""
        self.sent_bytes += ask.stop - ask.start
        parent: str | None = TRAINER
        if ask.engine:
            assert isinstance(held, _Snapshot)
            if ask.offer:
                held.tree.offered(ask.engine, ask.offer)
            if ask.lost:
                held.tree.lost(ask.lost)
            parent = held.tree.parent_of(ask.engine, time.monotonic())
        size = len(held.buffer)
        return ReadReply(
            ask.ticket, ask.start, ask.stop, held.sequence, size, parent=parent or TRAINER, wait=parent is None
        )

    def _at(self, location: str) -> _Snapshot:
        return self._snapshots[self._locations.index(location)]

    def _free(self, held: Collection[str]) -> str:
        return next(location for location in self._locations if location not in held)


class Tree:
    """The tree in which engines fetch one version, which grows with every request. Used by one thread at a time.

    The tree is pure arithmetic over the engines' requests in the order of their arrival. An engine has no position in
    the tree before it asks, so a slow, late or dead engine delays only the engines that already fetch from it, and
    these can turn to the trainer. Only an engine that has the whole version, proved by the manifest's digest, becomes a
    parent.
    """

    def __init__(self, fan_out: int = FAN_OUT) -> None:
        self._fan_out = fan_out
        self._parents: dict[str, str] = {}
        self._offers: dict[str, str] = {}
        self._seen: dict[str, float] = {}

    def parent_of(self, engine: str, now: float) -> str | None:
        """Return where this engine fetches: `TRAINER`, the location of another engine's offer, or None for "ask again".

        An engine that asks again keeps its parent, unless the parent was lost; then it gets the trainer.
        """
        self._seen[engine] = now
        known = self._parents.get(engine)
        if known is not None and (known == TRAINER or known in self._offers):
            return known
        found = TRAINER if known is not None else self._room()
        if found is None and not self._under_way(now):
            found = TRAINER
        if found is not None:
            self._parents[engine] = found
        return found

    def offered(self, engine: str, location: str) -> None:
        """Record that this engine has the version and serves it at this location."""
        self._offers[location] = engine

    def lost(self, location: str) -> None:
        """Remove an offer that failed or was wrong, so that nobody else is sent there."""
        self._offers.pop(location, None)

    def _room(self) -> str | None:
        children = [*self._parents.values()]
        # The trainer comes first, then the engine with the fewest children; of several, the one that offered first.
        free = [at for at in (TRAINER, *self._offers) if children.count(at) < self._fan_out]
        return TRAINER if TRAINER in free else min(free, key=children.count, default=None)

    def _under_way(self, now: float) -> bool:
        """Return whether an engine that fetches now may still become a parent."""
        arrived = set(self._offers.values())
        return any(engine not in arrived and now - self._seen[engine] < SILENCE for engine in self._parents)


class Transport:
    """The `tcp` transport: sockets, which are encrypted beyond loopback."""

    uses_keys = True

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        receivers = settings.receivers if settings.relays else 1
        return TcpSender(bind=settings.bind, keys=settings.keys, receivers=receivers)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return TcpSource(keys=settings.keys)
