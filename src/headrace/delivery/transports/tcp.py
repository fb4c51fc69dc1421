"""The trainer's end of the `tcp` transport: it serves byte ranges of two snapshots in memory to any number of engines.

A snapshot is not overwritten before it is released, and every reply names the write that its bytes come from. If there
are many engines, the trainer tells them to fetch from each other (see `tcp_tree`), but it serves every engine that asks
it for bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.delivery.copying import copy_all
from headrace.delivery.plan import PackingPlan, Views
from headrace.delivery.transports.base import Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.places import LIMIT, SenderPlaces
from headrace.delivery.transports.tcp_memory import ServedMemory
from headrace.delivery.transports.tcp_server import decode_ask, nothing_held, refusal_of, refuse, serve
from headrace.delivery.transports.tcp_source import TcpSource
from headrace.delivery.transports.tcp_tree import TRAINER, TREE_ABOVE, Tree
from headrace.delivery.transports.tcp_wire import ReadReply, ReadRequest, is_loopback
from headrace.errors import ConfigError, DeliveryError


class TcpSender:
    """The trainer's end, a server that runs from its creation until `close`."""

    name = "tcp"

    def __init__(self, *, bind: str = "127.0.0.1", keys: Path | None = None, receivers: int = 1) -> None:
        """Start the server on `bind`, an address of this host.

        If that is not loopback, `keys` must be the file with the keys of the run. `receivers` is the number of engines
        that fetch each version; more than `TREE_ABOVE` engines form a tree.
        """
        run_keys = None if is_loopback(bind) else read_keys(keys)
        self.sent_bytes = 0
        """The bytes of weights that this sender has sent since it was made."""
        self._places = SenderPlaces("snapshot")
        self._lock = threading.Lock()
        self._held = [nothing_held() for _ in range(LIMIT)]
        self._memory = [ServedMemory() for _ in range(LIMIT)]
        self._views = [Views(held.buffer) for held in self._held]
        self._trees = [Tree() for _ in range(LIMIT)]
        self._sequence = 0
        try:
            # A lambda looks up `respond` at every request, so that it may be wrapped while the server runs.
            self._server = serve(bind, run_keys, lambda frames: self.respond(frames))
        except OSError as error:
            raise ConfigError(f"[delivery] bind: cannot listen on {bind}: {error.strerror}") from error
        tree = receivers > TREE_ABOVE
        self._locations = [str(self._server.location(place, tree=tree)) for place in range(LIMIT)]

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free snapshot; see `Sender.wait`."""
        self._places.wait(version, timeout)

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights into a free snapshot; see `Sender.write`."""
        with self._places.filling(version, self._free, self.release) as location:
            place = self._locations.index(location)
            held = self._held[place]
            with self._lock:
                self._sequence += 1
                held.whole, held.version, held.sequence = False, version, self._sequence
                self._trees[place] = Tree()
                if len(held.buffer) != plan.nbytes:
                    self._memory[place] = ServedMemory(plan.nbytes)
                    held.buffer = self._memory[place].bytes
                    self._views[place] = Views(held.buffer)
            with torch.no_grad():
                copy_all(self._views[place].of(plan.entries), weights)
            with self._lock:
                held.whole = True
        return location

    def finish(self, location: str) -> None:
        """Do nothing: a snapshot is served as soon as it is written."""

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of a snapshot that was written and not released."""
        if not self._places.holds(location):
            raise DeliveryError(f"snapshot {location} holds nothing")
        return self._views[self._locations.index(location)].of(plan.entries)

    def release(self, location: str) -> None:
        """Stop serving the snapshot and allow it to be overwritten."""
        with self._lock:
            self._held[self._locations.index(location)].whole = False
        self._places.release(location)

    def close(self) -> None:
        """Stop serving, and release the port and the memory."""
        self._places.close()
        self._server.close()
        self._held = [nothing_held() for _ in range(LIMIT)]
        self._memory = [ServedMemory() for _ in range(LIMIT)]
        self._views = [Views(held.buffer) for held in self._held]

    def respond(self, frames: list[bytes]) -> list[Any]:
        """Answer one request of an engine; see `Respond`. The server's threads call this method."""
        ask = decode_ask(frames)
        if ask is None:
            return refuse(ask, "this is not a request for weights")
        with self._lock:
            held = self._held[ask.place] if 0 <= ask.place < LIMIT else None
            refusal = refusal_of(held, ask)
            if held is None or refusal:
                return refuse(ask, refusal)
            parent = self._parent(ask)
            header = ReadReply(
                *(ask.ticket, ask.start, ask.stop, held.sequence, len(held.buffer)),
                parent=parent or TRAINER,
                wait=parent is None,
            )
            # The bytes are sent in place. The slice keeps the memory alive; `sequence` shows if it was overwritten.
            payload = self._memory[ask.place].part(ask.start, ask.stop)
            self.sent_bytes += len(payload)
        return [msgspec.msgpack.encode(header), payload]

    def _free(self, held: Collection[str]) -> str:
        return next(location for location in self._locations if location not in held)

    def _parent(self, ask: ReadRequest) -> str | None:
        if not ask.engine:
            return TRAINER
        tree = self._trees[ask.place]
        if ask.offer:
            tree.offered(ask.engine, ask.offer)
        if ask.lost:
            tree.lost(ask.lost)
        return tree.parent_of(ask.engine, time.monotonic())


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
