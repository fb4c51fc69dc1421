"""The client connections of the `tcp` transport: a broken connection is made again, and every wait has a deadline.

On loopback a connection is plain. Beyond loopback, ZeroMQ's CURVE encrypts it and authenticates both ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.tcp_wire import Into, ReadReply, ReadRequest, TcpLocation
from headrace.errors import DeliveryError

RECONNECT_MS = 100
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Connection(Protocol):
    """A connection to one server. Used by one thread at a time."""

    endpoint: str
    encrypted: bool

    def send(self, ask: ReadRequest) -> None:
        """Send a request without waiting for anything."""
        ...

    def receive(self, patience: float, into: Into) -> ReadReply | None:
        """Return the next reply, or None if the connection broke; `into` says where the reply's bytes go.

        Raises `DeliveryError` if no reply comes within `patience` seconds, and any error that `into` raises.
        """
        ...

    def drop_old_answers(self) -> None:
        """Forget that the connection broke while it was idle: that says nothing about the next fetch."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


class CurveConnection:
    """An encrypted connection; see `Connection`."""

    encrypted = True

    def __init__(self, context: zmq.Context[Any], location: TcpLocation, keys: Path | None) -> None:
        """Begin to connect; `keys` is the file with the keys of the run."""
        self.endpoint = location.endpoint
        run_keys = read_keys(keys)
        self._socket = context.socket(zmq.DEALER)
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
            try:
                answer = msgspec.msgpack.decode(header.buffer, type=ReadReply)
            except msgspec.DecodeError as error:
                raise DeliveryError(f"the server at {self.endpoint} does not speak of weights: {error}") from error
            data = payload[0].buffer if payload else b""
            target = into(answer, len(data))
            if target is not None:
                np.frombuffer(target, np.uint8)[:] = np.frombuffer(data, np.uint8)
            return answer
        if self._monitor in ready:
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise DeliveryError(f"the server at {self.endpoint} does not accept the keys of this run")
            return None
        raise DeliveryError(f"the server at {self.endpoint} said nothing for {patience:.3g} s")

    def drop_old_answers(self) -> None:
        """See `Connection.drop_old_answers`."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)

    def close(self) -> None:
        """See `Connection.close`."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
