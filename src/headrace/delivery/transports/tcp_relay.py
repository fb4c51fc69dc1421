"""A relay is an engine that serves a version to other engines, after the digest of its own copy matched the manifest's.

The trainer decides which engine fetches from which, in `tcp_tree`. A relay is not trusted:

- Manifests never pass through a relay. They come from the trainer through the controller, and their digest proves the
  bytes, wherever the bytes came from. If a relay sent wrong bytes, the whole version is fetched from the trainer.
- Engines ask the trainer, not the relay, whether the place still holds the version and which write it holds.

Off loopback a relay encrypts and authenticates like the trainer, with the same two key pairs: one pair is for all
servers of the run, the other for all clients. A separate key pair for each relay would prove nothing more, because
every engine reads the one file with all keys and could use any of them. The keys prove that the other end belongs to
the run; this is what a child must know before it asks, and a relay before it sends. Keys are never sent, and none are
made after the start of the run. An encrypted version is never fetched from a relay that does not encrypt.

A relay listens on the address from which its host reaches the trainer, so it is reachable from other hosts only if the
trainer is.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.tcp_server import HeldBytes, decode_ask, nothing_held, refusal_of, refuse, serve
from headrace.delivery.transports.tcp_wire import ReadReply, TcpLocation
from headrace.errors import DeliveryError


class Relay:
    """A server of one version at a time to other engines. All methods may be called from any thread."""

    def __init__(self, trainer: TcpLocation, keys: Path | None) -> None:
        """Start the server; raises `DeliveryError` if it cannot listen on the address that faces the trainer."""
        self._lock = threading.Lock()
        self._held = nothing_held()
        address = _own_address(trainer)
        run_keys = read_keys(keys) if trainer.encrypted else None
        try:
            # A lambda looks up `respond` at every request, so that it may be wrapped while the server runs.
            self._server = serve(address, run_keys, lambda frames: self.respond(frames))
        except OSError as error:
            raise DeliveryError(f"cannot listen on {address}: {error.strerror}") from error
        self.location = str(self._server.location(0))

    def serve(self, version: int, sequence: int, packed: torch.Tensor) -> None:
        """Serve these bytes, which are those of the trainer's write `sequence`, from now on."""
        with self._lock:
            self._held = HeldBytes(packed, version, sequence, whole=True)

    def withdraw(self) -> None:
        """Stop serving the bytes, because they are about to change; after this returns, no reply reads them."""
        with self._lock:
            self._held.whole = False

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self.withdraw()
        self._server.close()

    def respond(self, frames: list[bytes]) -> list[Any]:
        """Answer one request of another engine; see `Respond`. The server's threads call this method."""
        ask = decode_ask(frames)
        if ask is None:
            return refuse(ask, "this is not a request for weights")
        with self._lock:
            held = self._held if ask.place == 0 else None
            refusal = refusal_of(held, ask)
            if held is None or refusal:
                return refuse(ask, refusal)
            header = ReadReply(ask.ticket, ask.start, ask.stop, held.sequence, len(held.buffer))
            # Copied, because the next version may be fetched into these bytes before this reply is sent completely.
            payload = held.buffer.numpy()[ask.start : ask.stop].tobytes()
        return [msgspec.msgpack.encode(header), payload]


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
