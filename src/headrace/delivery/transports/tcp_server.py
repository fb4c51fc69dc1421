"""The servers of byte ranges of versions: the trainer, and every engine that relays weights.

Without the keys of the run, no server listens beyond this host. The trainer decides which engine fetches from which. A
relay is not trusted:

- Manifests never pass through a relay. They come from the trainer through the controller, and their digest proves the
  bytes, wherever the bytes came from. If a relay sent wrong bytes, the whole version is fetched from the trainer.
- Engines ask the trainer, not the relay, whether the place still holds the version and which write it holds.

Off loopback a relay encrypts and authenticates like the trainer, with the same two key pairs: one pair is for all
servers of the run, the other for all clients. A separate key pair for each relay would prove nothing more, because
every engine reads the one file with all keys and could use any of them. The keys prove that the other end belongs to
the run; this is what a child must know before it asks, and a relay before it sends. Keys are never sent, and none are
made after the start of the run. An encrypted version is never fetched from a relay that does not encrypt.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.delivery.transports.keys import RunKeys, read_keys
from headrace.delivery.transports.tcp_curve import CurveServer
from headrace.delivery.transports.tcp_plain import PlainServer
from headrace.delivery.transports.tcp_wire import LARGEST_BUCKET, MemorySlice, ReadReply, ReadRequest, TcpLocation
from headrace.errors import DeliveryError


class ServedMemory:
    """Memory of `nbytes` bytes as a tensor and, where the system has `memfd_create`, also as a file in memory.

    The file has no name in the file system. It is freed with its last user; a send in progress keeps it alive.
    """

    def __init__(self, nbytes: int = 0) -> None:
        self.file = -1
        if nbytes and hasattr(os, "memfd_create"):
            self.file = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, nbytes)
            self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(self.file, nbytes), np.uint8))
        else:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

    def part(self, start: int, stop: int) -> MemorySlice:
        """Return a slice of the bytes, to be sent."""
        return MemorySlice(self.bytes.numpy().data[start:stop], self.file, start, self)


class HeldBytes:
    """One place of a server: its bytes, and the version and the write that they are."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.version = -1
        self.sequence = 0
        """The number of the trainer's write that made these bytes."""
        self.whole = False
        """Whether the version is completely written and not released."""

    def payload(self, start: int, stop: int) -> bytes | MemorySlice:
        """Return a copy of these bytes, because they may be overwritten before a reply is sent completely."""
        return self.buffer.numpy()[start:stop].tobytes()


class WeightServer:
    """Answers requests for the bytes in its places, from its creation until it is closed."""

    def __init__(self, places: Sequence[HeldBytes], bind: str, keys: RunKeys | None) -> None:
        """Start the server on `bind`, an address of this host; it is encrypted if there are keys.

        Raises `OSError` if the server cannot listen there.
        """
        self._held = places
        self._lock = threading.Lock()
        # A lambda looks up `respond` at every request, so that it may be wrapped while the server runs.
        self._server = (
            PlainServer(bind, lambda frames: self.respond(frames))
            if keys is None
            else CurveServer(bind, keys, lambda frames: self.respond(frames))
        )

    def respond(self, frames: list[bytes]) -> list[Any]:
        """Answer one request; see `Respond`. The threads of the server call this method."""
        try:
            ask = msgspec.msgpack.decode(frames[0], type=ReadRequest)
        except (IndexError, msgspec.DecodeError):
            return refusal("this is not a request for weights")
        with self._lock:
            held = self._held[ask.place] if 0 <= ask.place < len(self._held) else None
            why_not = _why_not(held, ask)
            if held is None or why_not:
                return refusal(why_not, ask)
            return [msgspec.msgpack.encode(self._header(held, ask)), held.payload(ask.start, ask.stop)]

    def _header(self, held: HeldBytes, ask: ReadRequest) -> ReadReply:
        """Return the header of the reply to a request that can be served. Called with the lock."""
        return ReadReply(ask.ticket, ask.start, ask.stop, held.sequence, len(held.buffer))


class Relay(WeightServer):
    """An engine's server of one version at a time to other engines, after the digest of its own copy was right.

    A relay listens on the address from which its host reaches the trainer, so it is reachable from other hosts only if
    the trainer is. All methods may be called from any thread.
    """

    def __init__(self, trainer: TcpLocation, keys: Path | None) -> None:
        """Start the server; raises `DeliveryError` if it cannot listen on the address that faces the trainer."""
        self._place = HeldBytes()
        address = _own_address(trainer)
        try:
            super().__init__([self._place], address, read_keys(keys) if trainer.encrypted else None)
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


def _why_not(held: HeldBytes | None, ask: ReadRequest) -> str:
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
