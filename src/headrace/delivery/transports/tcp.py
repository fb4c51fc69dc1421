"""Weights over TCP, the trainer's end: two snapshots in memory, served in byte ranges to any number of engines.

A snapshot is not written again before it is released, and every answer names the write that its bytes come from.
Nothing listens beyond this host without the keys of the run: there, every byte is encrypted and every client known.
"""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from headrace.delivery.plan import Plan, pack, unpack
from headrace.delivery.transports.keys import RunKeys, read_keys
from headrace.delivery.transports.places import LIMIT, Places
from headrace.delivery.transports.tcp_wire import LARGEST_BUCKET, Answer, Ask, Location, is_loopback
from headrace.errors import ConfigError, DeliveryError

_POLL_MS = 100
_ZAP_DOMAIN = "headrace"


class _Snapshot(msgspec.Struct):
    """One place: its bytes, and what they are."""

    buffer: torch.Tensor
    version: int = -1
    sequence: int = 0
    whole: bool = False


class TcpSender:
    """The trainer's end: a server from the moment it is made until it is closed."""

    name = "tcp"

    def __init__(self, *, bind: str = "127.0.0.1", keys: Path | None = None) -> None:
        """`bind` is an address of this host; beyond loopback, `keys` must be the file with the keys of the run."""
        run_keys = None if is_loopback(bind) else read_keys(keys)
        self._places = Places("snapshot")
        self._lock = threading.Lock()
        self._snapshots = [_Snapshot(torch.empty(0, dtype=torch.uint8)) for _ in range(LIMIT)]
        self._sequence = 0
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._socket, self._locations = self._listen(bind, run_keys)
        except zmq.ZMQError as error:
            self._end_context()
            raise ConfigError(f"[delivery] bind: cannot listen on {bind}: {error.strerror}") from error
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free snapshot; see `Sender.wait`."""
        self._places.wait(version, timeout)

    def write(self, version: int, plan: Plan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights into a free snapshot; see `Sender.write`."""
        location = self._places.take(version, self._free)
        snapshot = self._snapshots[self._locations.index(location)]
        written = False
        try:
            with self._lock:
                self._sequence += 1
                snapshot.whole, snapshot.version, snapshot.sequence = False, version, self._sequence
                if len(snapshot.buffer) != plan.nbytes:
                    snapshot.buffer = torch.empty(plan.nbytes, dtype=torch.uint8)
            pack(snapshot.buffer, plan.entries, weights)
            with self._lock:
                snapshot.whole = written = True
        finally:
            if not written:
                self.release(location)
        return location

    def finish(self, location: str) -> None:
        """Nothing is left to do: a snapshot is served once it is written."""

    def snapshot(self, location: str, plan: Plan) -> dict[str, torch.Tensor]:
        """Views of a snapshot that was written and not released."""
        if not self._places.holds(location):
            raise DeliveryError(f"snapshot {location} holds nothing")
        return unpack(self._snapshots[self._locations.index(location)].buffer, plan.entries)

    def release(self, location: str) -> None:
        """The snapshot is no longer served and may be written again."""
        with self._lock:
            self._snapshots[self._locations.index(location)].whole = False
        self._places.release(location)

    def close(self) -> None:
        """Stop serving, and let go of the port and the memory."""
        self._places.close()
        self._closing.set()
        self._server.join()
        with self._lock:
            if not self._context.closed:
                self._end_context()
        self._snapshots = [_Snapshot(torch.empty(0, dtype=torch.uint8)) for _ in range(LIMIT)]

    def _listen(self, bind: str, keys: RunKeys | None) -> tuple[zmq.Socket[bytes], list[str]]:
        six = ipaddress.ip_address(bind).version == 6
        host = f"[{bind}]" if six else bind
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, six)
        if keys is not None:
            self._authenticator = _authenticator(self._context, keys)
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        try:
            socket.bind(f"tcp://{host}:*")
        except zmq.ZMQError:
            socket.close()
            raise
        port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        return socket, [str(Location(keys is not None, host, port, place)) for place in range(LIMIT)]

    def _end_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _free(self, held: Collection[str]) -> str:
        return next(location for location in self._locations if location not in held)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(_POLL_MS):
                    identity, *frames = self._socket.recv_multipart()
                    self._socket.send_multipart([identity, *self._answer(frames)], copy=False)
        finally:
            self._socket.close()

    def _answer(self, frames: list[bytes]) -> list[Any]:
        try:
            ask = msgspec.msgpack.decode(frames[0], type=Ask)
        except (IndexError, msgspec.DecodeError):
            return [msgspec.msgpack.encode(Answer(-1, 0, 0, 0, 0, "this is not a request for weights"))]
        with self._lock:
            snapshot = self._snapshots[ask.place] if 0 <= ask.place < LIMIT else None
            refusal = _refusal(snapshot, ask)
            if snapshot is None or refusal:
                return [msgspec.msgpack.encode(Answer(ask.ticket, ask.start, ask.stop, 0, 0, refusal))]
            header = Answer(ask.ticket, ask.start, ask.stop, snapshot.sequence, len(snapshot.buffer))
            # Sent from where they lie; the frame keeps the buffer alive, and `sequence` shows if it was written again.
            payload = snapshot.buffer.numpy().data[ask.start : ask.stop]
        return [msgspec.msgpack.encode(header), payload]


def _refusal(snapshot: _Snapshot | None, ask: Ask) -> str:
    if snapshot is None:
        return f"there is no place {ask.place}"
    if snapshot.version != ask.version:
        return f"place {ask.place} holds version {snapshot.version}, not {ask.version}: it was used again"
    if not snapshot.whole:
        return f"version {ask.version} was released, or is not written to its end"
    if not 0 <= ask.start <= ask.stop <= len(snapshot.buffer):
        return f"version {ask.version} has {len(snapshot.buffer)} bytes, not {ask.stop}"
    if ask.stop - ask.start > LARGEST_BUCKET:
        return f"a bucket has at most {LARGEST_BUCKET} bytes"
    return ""


class _OnlyTheRun:
    """Tells the authenticator which clients may connect."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _authenticator(context: zmq.Context[Any], keys: RunKeys) -> ThreadAuthenticator:
    """It must run before the socket is bound: without it, ZeroMQ takes every client that knows the public key."""
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=_OnlyTheRun(keys.client_public))
    return authenticator
