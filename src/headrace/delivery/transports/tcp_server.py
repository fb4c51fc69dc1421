"""The servers of byte ranges of versions, in the trainer and in every engine that relays weights.

Without the keys of the run, no server listens beyond this host; with them, every byte is encrypted and every client is
authenticated. Nothing that a client sends can end the thread that answers.
"""

from __future__ import annotations

import ipaddress
import threading
from typing import Any, Protocol

import msgspec
import torch
import zmq
from zmq.auth.thread import ThreadAuthenticator

from headrace.delivery.transports.keys import RunKeys
from headrace.delivery.transports.tcp_memory import MemorySlice
from headrace.delivery.transports.tcp_plain import PlainServer
from headrace.delivery.transports.tcp_wire import LARGEST_BUCKET, ReadReply, ReadRequest, Respond, TcpLocation
from headrace.errors import DeadlineError

_POLL_MS = 100
_CLOSE_SECONDS = 10.0
_ZAP_DOMAIN = "headrace"


class HeldBytes(msgspec.Struct):
    """One place of a server: its bytes, and the version and the write that they are."""

    buffer: torch.Tensor
    version: int = -1
    sequence: int = 0
    """The number of the trainer's write that made these bytes."""
    whole: bool = False
    """Whether the version is completely written and not released."""


def nothing_held() -> HeldBytes:
    """Return a place that was never written."""
    return HeldBytes(torch.empty(0, dtype=torch.uint8))


class TcpServer(Protocol):
    """A server that answers requests in the background, from its creation until `close`."""

    def location(self, place: int, *, tree: bool = False) -> TcpLocation:
        """Return the location by which clients find this place of the server."""
        ...

    def close(self) -> None:
        """Stop answering and release the port; raises `DeadlineError` if a thread does not end in time. Idempotent."""
        ...


def serve(bind: str, keys: RunKeys | None, respond: Respond) -> TcpServer:
    """Start a server on `bind`, an address of this host; it is encrypted if there are keys.

    `respond` may be called from several threads. Raises `OSError` if the server cannot listen there.
    """
    if keys is None:
        return PlainServer(bind, respond)
    try:
        return CurveServer(bind, keys, respond)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


class CurveServer:
    """A server that encrypts, and authenticates its clients."""

    def __init__(self, bind: str, keys: RunKeys, respond: Respond) -> None:
        """Start the server; raises `zmq.ZMQError` if it cannot listen there."""
        self._respond = respond
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        six = ipaddress.ip_address(bind).version == 6
        self._host = f"[{bind}]" if six else bind
        try:
            self._socket = self._listen(keys, six)
        except zmq.ZMQError:
            self._end_context()
            raise
        self._port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def location(self, place: int, *, tree: bool = False) -> TcpLocation:
        """See `TcpServer.location`."""
        return TcpLocation(True, self._host, self._port, place, tree)

    def close(self) -> None:
        """See `TcpServer.close`."""
        self._closing.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(f"the server of weights on port {self._port} did not end within {_CLOSE_SECONDS:g} s")
        with self._lock:
            if not self._context.closed:
                self._end_context()

    def _listen(self, keys: RunKeys, six: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, six)
        self._authenticator = _authenticator(self._context, keys)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        try:
            socket.bind(f"tcp://{self._host}:*")
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _end_context(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                if self._socket.poll(_POLL_MS):
                    identity, *frames = self._socket.recv_multipart()
                    header, *payload = self._respond(frames)
                    views = (part.view if isinstance(part, MemorySlice) else part for part in payload)
                    self._socket.send_multipart([identity, header, *views], copy=False)
        finally:
            self._socket.close()


def decode_ask(frames: list[bytes]) -> ReadRequest | None:
    """Decode the request of a client; None if the frames are not a request."""
    try:
        return msgspec.msgpack.decode(frames[0], type=ReadRequest)
    except (IndexError, msgspec.DecodeError):
        return None


def refuse(ask: ReadRequest | None, refusal: str) -> list[Any]:
    """Return the frames of a refusal, which has no bytes."""
    if ask is None:
        return [msgspec.msgpack.encode(ReadReply(-1, 0, 0, 0, 0, refusal))]
    return [msgspec.msgpack.encode(ReadReply(ask.ticket, ask.start, ask.stop, 0, 0, refusal))]


def refusal_of(held: HeldBytes | None, ask: ReadRequest) -> str:
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


class _OnlyTheRun:
    """Tells the authenticator which clients may connect: only those with the client key of the run."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _authenticator(context: zmq.Context[Any], keys: RunKeys) -> ThreadAuthenticator:
    """Start the authenticator. It must run before the socket is bound, because without it ZeroMQ accepts every client
    that knows the server's public key.
    """
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=_ZAP_DOMAIN, credentials_provider=_OnlyTheRun(keys.client_public))
    return authenticator
