"""An engine that hands a version on: it serves the bytes that it fetched once their digest was the manifest's.

Whom one engine fetches from is the trainer's to say, in `tcp_tree`. A relay is not trusted:

- Manifests never pass through one. They come from the trainer by the controller, and the digest in them proves what
  came, wherever it came from. What a relay sent wrong is fetched again, all of it, from the trainer.
- Whether the place still holds the version, and which write of it, is asked of the trainer.

Off loopback it is encrypted and authenticated as the trainer is, with the same two key pairs: the run's servers have
one, its clients the other. A pair of its own would prove no more. Every engine reads the one file that holds both, so
whoever could pass for the trainer with it could as well with any other key in there; what the keys prove is that the
other end belongs to the run, and that is what a child needs to know before it asks, and a relay before it sends. Keys
never travel, and none are made after the start. A relay of an encrypted version that is not encrypted is not asked.

It listens on the address from which this host reaches the trainer, so beyond loopback only where the trainer does.
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
    """Serves what it is given until it is given something else. All methods may be called from any thread."""

    def __init__(self, trainer: TcpLocation, keys: Path | None) -> None:
        """Raises `DeliveryError` when nothing can listen on the way to this trainer."""
        self._lock = threading.Lock()
        self._held = nothing_held()
        address = _own_address(trainer)
        run_keys = read_keys(keys) if trainer.encrypted else None
        try:
            # Looked up at every request, so that `respond` may be wrapped while the server runs.
            self._server = serve(address, run_keys, lambda frames: self.respond(frames))
        except OSError as error:
            raise DeliveryError(f"cannot listen on {address}: {error.strerror}") from error
        self.location = str(self._server.location(0))

    def serve(self, version: int, sequence: int, packed: torch.Tensor) -> None:
        """From now on others get these bytes, which the trainer's write `sequence` made."""
        with self._lock:
            self._held = HeldBytes(packed, version, sequence, whole=True)

    def withdraw(self) -> None:
        """The bytes are about to change: no answer has them any more when this returns."""
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
            # A copy: the next version is fetched into these bytes, perhaps before all of this has been sent.
            payload = held.buffer.numpy()[ask.start : ask.stop].tobytes()
        return [msgspec.msgpack.encode(header), payload]


def _own_address(trainer: TcpLocation) -> str:
    """The address of this host on the way to the trainer. Nothing is sent to find it."""
    host = trainer.host.strip("[]")
    family = socket.AF_INET6 if trainer.host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, trainer.port))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DeliveryError(f"no way to {host}: {error.strerror}") from error
