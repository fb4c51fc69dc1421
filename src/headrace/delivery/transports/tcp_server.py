"""The servers of the `tcp` transport: the trainer's end, and the relays of engines that have a version.

The trainer serves byte ranges of two snapshots in memory to any number of engines. A snapshot is not overwritten before
it is released, and every reply names the write that its bytes come from. If there are many engines, they fetch in a
tree: the trainer serves FAN_OUT engines, and each engine that has the version serves FAN_OUT others. The trainer serves
every engine that asks it for bytes, whatever the tree says. Without the keys of the run, no server listens beyond this
host. A relay is not trusted:

- Manifests never pass through a relay. They come from the trainer through the controller, and their digest proves the
  bytes, wherever the bytes came from. If a relay sent wrong bytes, the whole version is fetched from the trainer.
- Engines ask the trainer, not the relay, whether the place still holds the version and which write it holds.

Off loopback a relay encrypts and authenticates like the trainer, with the same two key pairs: one pair is for all
servers of the run, the other for all clients. A separate key pair for each relay would prove nothing more, because
every engine reads the one file with all keys and could use any of them. The keys prove that the other end belongs to
the run; this is what a child must know before it asks, and a relay before it sends. Keys are never sent, and none are
made after the start of the run. An encrypted version is never fetched from a relay that does not encrypt.
"""

import hmac
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.delivery.copying import copy_all
from headrace.delivery.plan import PackingPlan, Views
from headrace.delivery.transports.base import LIMIT, PlacedSender
from headrace.delivery.transports.tcp_paths import serve
from headrace.delivery.transports.tcp_wire import (
    LARGEST_BUCKET,
    MemorySlice,
    ReadReply,
    ReadRequest,
    RunKeys,
    TcpLocation,
    is_loopback,
    loopback_key,
    read_keys,
)
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


class _ServedMemory:
    """Memory of `nbytes` bytes as a tensor and, where the system has `memfd_create`, also as a file in memory.

    The file has no name in the file system. It is freed with its last user; a send in progress keeps it alive.
    """

    def __init__(self, nbytes: int) -> None:
        self.file = -1
        if nbytes and hasattr(os, "memfd_create"):
            self.file = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, nbytes)
            self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(self.file, nbytes), np.uint8))
        else:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)


class _Place:
    """One place of a server: its bytes, the version and the write that they are, and the tree of those who fetch it."""

    def __init__(self) -> None:
        self.hold(0)
        self.version = -1
        self.sequence = 0
        """The number of the trainer's write that made these bytes."""
        self.whole = False
        """Whether the version is completely written and not released."""
        self.tree = Tree()

    def hold(self, nbytes: int) -> None:
        """Replace the memory by memory of this size."""
        self.memory = _ServedMemory(nbytes)
        self.buffer = self.memory.bytes
        self.views = Views(self.buffer)

    def payload(self, start: int, stop: int) -> bytes | MemorySlice:
        """Return these bytes in place; the slice keeps the memory alive, and `sequence` shows if it was overwritten."""
        # Bytes of a relay may be overwritten before a reply is sent completely, so they are copied.
        if self.buffer is not self.memory.bytes:
            return self.buffer.numpy()[start:stop].tobytes()
        return MemorySlice(self.buffer.numpy().data[start:stop], self.memory.file, start, self.memory)


class _WeightServer:
    """Answers requests for the bytes in its places, from its creation until it is closed."""

    def __init__(self, places: Sequence[_Place], bind: str, keys: RunKeys | None, *, encrypt: bool) -> None:
        self.sent_bytes = 0
        """The bytes of weights that this server has sent since it was made."""
        self._held = places
        self._lock = threading.Lock()
        # A lambda looks up `respond` at every request, so that it may be wrapped while the server runs.
        self._key = ""
        self._server = serve(bind, keys if encrypt else None, lambda frames: self._checked(frames))
        if keys is not None and not encrypt:
            self._key = loopback_key(keys, self._server.location(0).port)

    def _checked(self, frames: list[bytes]) -> list[Any]:
        """Answer one request if it has the key of this port. Requests beyond loopback need none."""
        if self._key:
            try:
                ask = msgspec.msgpack.decode(frames[0], type=ReadRequest)
            except (IndexError, msgspec.DecodeError):
                return refusal("this is not a request for weights")
            if not hmac.compare_digest(ask.key.encode(), self._key.encode()):
                return refusal("the keys of the run are needed", ask)
        return self.respond(frames)

    def respond(self, frames: list[bytes]) -> list[Any]:
        """Answer one request in a thread of the server; see `Respond`. In a tree, the reply says from whom to fetch."""
        try:
            ask = msgspec.msgpack.decode(frames[0], type=ReadRequest)
        except (IndexError, msgspec.DecodeError):
            return refusal("this is not a request for weights")
        with self._lock:
            held = self._held[ask.place] if 0 <= ask.place < len(self._held) else None
            why_not = _why_not(held, ask)
            if held is None or why_not:
                return refusal(why_not, ask)
            self.sent_bytes += ask.stop - ask.start
            parent = held.tree.asked(ask, time.monotonic()) if ask.engine else TRAINER
            size = len(held.buffer)
            header = ReadReply(
                ask.ticket, ask.start, ask.stop, held.sequence, size, parent=parent or TRAINER, wait=parent is None
            )
            return [msgspec.msgpack.encode(header), held.payload(ask.start, ask.stop)]


class TcpSender(PlacedSender, _WeightServer):
    """The trainer's end, a server that runs from its creation until `close`."""

    name = "tcp"

    def __init__(self, *, bind: str = "127.0.0.1", keys: Path | None = None, receivers: int = 1) -> None:
        """Start the server on `bind`, an address of this host.

        `keys` is the file with the keys of the run; only a server on loopback may do without. `receivers` is the number
        of engines that fetch each version; more than `TREE_ABOVE` engines form a tree.
        """
        PlacedSender.__init__(self, "snapshot")
        self._snapshots = [_Place() for _ in range(LIMIT)]
        self._sequence = 0
        run_keys = None if keys is None and is_loopback(bind) else read_keys(keys)
        try:
            _WeightServer.__init__(self, self._snapshots, bind, run_keys, encrypt=not is_loopback(bind))
        except OSError as error:
            raise ConfigError(f"[delivery] bind: cannot listen on {bind}: {error.strerror}") from error
        tree = receivers > TREE_ABOVE
        self._locations = [str(self._server.location(place, tree=tree)) for place in range(LIMIT)]

    def release(self, location: str) -> None:
        """Stop serving the snapshot and allow it to be overwritten."""
        with self._lock:
            self._at(location).whole = False
        super().release(location)

    def close(self) -> None:
        """Stop serving, and release the port and the memory."""
        super().close()
        self._server.close()
        self._snapshots[:] = [_Place() for _ in range(LIMIT)]

    def _at(self, location: str) -> _Place:
        return self._snapshots[self._locations.index(location)]

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        place = self._at(location)
        with self._lock:
            self._sequence += 1
            place.whole, place.version, place.sequence = False, version, self._sequence
            place.tree = Tree()
            if len(place.buffer) != plan.nbytes:
                place.hold(plan.nbytes)
        copy_all(place.views.of(plan.entries), weights)
        with self._lock:
            place.whole = True

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        return self._at(location).views.of(plan.entries)

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
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

    def asked(self, ask: ReadRequest, now: float) -> str | None:
        """Note what an engine's request says of offers, and return the parent of the engine as `parent_of` does."""
        if ask.offer:
            self.offered(ask.engine, ask.offer)
        if ask.lost:
            self.lost(ask.lost)
        return self.parent_of(ask.engine, now)

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


class Relay(_WeightServer):
    """An engine's server of one version at a time to other engines, after the digest of its own copy was right.

    A relay listens on the address from which its host reaches the trainer, so it is reachable from other hosts only if
    the trainer is. All methods may be called from any thread.
    """

    def __init__(self, trainer: TcpLocation, keys: Path | None) -> None:
        """Start the server; raises `DeliveryError` if it cannot listen on the address that faces the trainer."""
        self._place = _Place()
        address = _own_address(trainer)
        try:
            run_keys = read_keys(keys) if trainer.encrypted or (keys is not None and keys.is_file()) else None
            super().__init__([self._place], address, run_keys, encrypt=trainer.encrypted)
        except OSError as error:
            raise DeliveryError(f"cannot listen on {address}: {error.strerror}") from error
        self.location = str(self._server.location(0))

    def serve(self, version: int, sequence: int, packed: torch.Tensor) -> None:
        """Serve these bytes, which are those of the trainer's write `sequence`, from now on."""
        place = self._place
        with self._lock:
            place.buffer, place.version, place.sequence, place.whole = packed, version, sequence, True

    def withdraw(self) -> None:
        """Stop serving the bytes, because they are about to change; after this returns, no reply reads them."""
        with self._lock:
            self._place.whole = False

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self.withdraw()
        self._server.close()


def refusal(why: str, ask: ReadRequest | None = None) -> list[Any]:
    """Return the frames of a refusal, which has no bytes; without a request, no client recognises it as its own."""
    ticket, start, stop = (ask.ticket, ask.start, ask.stop) if ask is not None else (-1, 0, 0)
    return [msgspec.msgpack.encode(ReadReply(ticket, start, stop, 0, 0, why))]


def _why_not(held: _Place | None, ask: ReadRequest) -> str:
    """Return why this place cannot serve the request; an empty string if it can."""
    if held is None:
        return f"there is no place {ask.place}"
    if held.version != ask.version:
        return f"place {ask.place} holds version {held.version}, not {ask.version}: it was used again"
    if not held.whole:
        return f"version {ask.version} was released, or is not written to its end"
    if not 0 <= ask.start <= ask.stop <= len(held.buffer):
        return f"version {ask.version} has {len(held.buffer)} bytes, not {ask.stop}"
    if ask.stop - ask.start > LARGEST_BUCKET:
        return f"a bucket has at most {LARGEST_BUCKET} bytes"
    return ""


def _own_address(trainer: TcpLocation) -> str:
    """Return the address from which this host reaches the trainer; nothing is sent to find it."""
    host = trainer.host.strip("[]")
    family = socket.AF_INET6 if trainer.host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, trainer.port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DeliveryError(f"no way to {host}: {error.strerror}") from error
