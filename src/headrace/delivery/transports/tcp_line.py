"""A connection to one server of the `tcp` transport, made again when it breaks; no wait is longer than its deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.tcp_wire import Answer, Ask, Location
from headrace.errors import DeliveryError

RECONNECT_MS = 100
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Line:
    """A client of one server. Used by one thread at a time."""

    def __init__(self, context: zmq.Context[Any], location: Location, keys: Path | None) -> None:
        """`keys` is the file with the keys of the run, for a location that is encrypted."""
        self.endpoint = location.endpoint
        self.encrypted = location.encrypted
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.IPV6, location.host.startswith("["))
        try:
            if location.encrypted:
                run_keys = read_keys(keys)
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, run_keys.server_public.encode())
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, run_keys.client_public.encode())
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, run_keys.client_secret.encode())
        except DeliveryError:
            self._socket.close()
            raise
        self._monitor = self._socket.get_monitor_socket(_BROKEN)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(self.endpoint)

    def send(self, ask: Ask) -> None:
        """Ask, without waiting for anything."""
        try:
            self._socket.send(msgspec.msgpack.encode(ask), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise DeliveryError(f"the server at {self.endpoint} is gone: nothing can be sent to it") from error

    def receive(self, patience: float) -> tuple[Answer, Any] | None:
        """The next answer and its bytes, or None when the connection broke. Raises when nothing comes in time."""
        ready = dict(self._poller.poll(round(patience * 1000)))
        if self._socket in ready:
            header, *payload = self._socket.recv_multipart(copy=False)
            try:
                answer = msgspec.msgpack.decode(header.buffer, type=Answer)
            except msgspec.DecodeError as error:
                raise DeliveryError(f"the server at {self.endpoint} does not speak of weights: {error}") from error
            return answer, payload[0].buffer if payload else b""
        if self._monitor in ready:
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise DeliveryError(f"the server at {self.endpoint} does not accept the keys of this run")
            return None
        raise DeliveryError(f"the server at {self.endpoint} said nothing for {patience:.3g} s")

    def forget_the_past(self) -> None:
        """Connections that broke while nobody asked for anything say nothing about the next fetch."""
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)

    def close(self) -> None:
        """Let go of the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
