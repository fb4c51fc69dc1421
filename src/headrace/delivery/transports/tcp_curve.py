"""The byte path beyond loopback: ZeroMQ's CURVE encrypts every byte and authenticates both ends with the run's keys.

Nothing that a client sends can end the thread that answers. Every wait of a client has a deadline.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from headrace.delivery.transports.keys import RunKeys, read_keys
from headrace.delivery.transports.tcp_wire import (
    ByteServer,
    Connection,
    Into,
    MemorySlice,
    ReadReply,
    ReadRequest,
    Respond,
    TcpLocation,
)
from headrace.errors import DeliveryError

_POLL_MS = 100
_ZAP_DOMAIN = "headrace"
RECONNECT_MS = 100
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CurveServer(ByteServer):
    """A server that encrypts, and authenticates its clients; see `ByteServer`."""

    encrypted = True

    def __init__(self, bind: str, keys: RunKeys, respond: Respond) -> None:
        """Start the server on `bind`, an address of this host. Raises `OSError` if it cannot listen there."""
        super().__init__(bind)
        self._respond = respond
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._socket = self._listen(keys)
        except zmq.ZMQError as error:
            self._end_context()
            raise OSError(error.errno, error.strerror) from error
        self._port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `ByteServer.close`."""
        self._closing.set()
        self._join(self._thread)
        with self._lock:
            if not self._context.closed:
                self._end_context()

    def _listen(self, keys: RunKeys) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, self._host.startswith("["))
        self._authenticator = _authenticator(self._context, keys)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.bind(f"tcp://{self._host}:*")
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


class CurveConnection(Connection):
    """An encrypted connection; see `Connection`."""

    encrypted = True

    def __init__(self, location: TcpLocation, keys: Path | None) -> None:
        """Begin to connect; `keys` is the file with the keys of the run."""
        super().__init__(location)
        run_keys = read_keys(keys)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.IPV6, location.host.startswith("["))
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, run_keys.server_public.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, run_keys.client_public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, run_keys.client_secret.encode())
        self._monitor = self._socket.get_monitor_socket(_BROKEN)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self.endpoint)

    def send(self, ask: ReadRequest) -> None:
        """See `Connection.send`."""
        try:
            self._socket.send(msgspec.msgpack.encode(ask), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise DeliveryError(f"the server at {self.endpoint} is gone: nothing can be sent to it") from error

    def receive(self, patience: float, into: Into) -> ReadReply | None:
        """See `Connection.receive`."""
        ready = dict(self._poller.poll(round(patience * 1000)))
        if self._socket in ready:
            header, *payload = self._socket.recv_multipart(copy=False)
            answer = self._decode(header.buffer)
            data = payload[0].buffer if payload else b""
            target = into(answer, len(data))
            if target is not None:
                np.frombuffer(target, np.uint8)[:] = np.frombuffer(data, np.uint8)
            return answer
        if self._monitor in ready:
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise DeliveryError(f"the server at {self.endpoint} does not accept the keys of this run")
            return None
        raise self._silent(patience)

    def drop_old_answers(self) -> None:
        """See `Connection.drop_old_answers`."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)

    def close(self) -> None:
        """See `Connection.close`."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.destroy(linger=0)


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
