"""The byte path on loopback: plain sockets carry bytes from the served memory directly into the memory to fill.

Where the served memory is also a file, the kernel sends its pages without copying them first. A message is the lengths
of its header and its bytes, then the header, then the bytes. Every connection has its own server thread, so a client
that sends nonsense or does not read cannot disturb other clients. Every wait of a client has a deadline.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any

import msgspec

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

RECONNECT_SECONDS = 0.1
"""The pause between two attempts to connect."""
BUFFERED = 1 << 20
"""The size of the socket buffers. It is small, so that bytes are read while they are still in a cache."""
_LENGTHS = struct.Struct("<IQ")
_LARGEST_HEADER = 1 << 16
_DROPPED = 1 << 20
"""Unwanted bytes are read and dropped in pieces of this size."""


class PlainServer(ByteServer):
    """A server of plain sockets; see `ByteServer`."""

    encrypted = False

    def __init__(self, bind: str, respond: Respond) -> None:
        """Start the server on `bind`, an address of this host. Raises `OSError` if it cannot listen there."""
        super().__init__(bind)
        self._respond = respond
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._bind = bind
        self._listener = socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
        self._port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `ByteServer.close`."""
        with self._lock:
            self._closing = True
            opened = dict(self._open)
        _shut(self._listener)
        # On some systems that does not wake the thread that waits in `accept`, but a new client does.
        with contextlib.suppress(OSError):
            socket.create_connection((self._bind, self._port), timeout=RECONNECT_SECONDS).close()
        for connection in opened:
            _shut(connection)
        for thread in (self._thread, *opened.values()):
            self._join(thread)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection = self._listener.accept()[0]
                except OSError:
                    # The listener was closed, or a client was gone before it was served.
                    if self._closing:
                        return
                    time.sleep(RECONNECT_SECONDS)
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="weights", daemon=True)
                with self._lock:
                    if self._closing:
                        connection.close()
                        return
                    self._open[connection] = thread
                    thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _tune(connection)
            while (request := _request(connection)) is not None:
                header, *payload = self._respond([request])
                _send(connection, header, *payload)
        except OSError:
            # The client is gone, so nobody needs the reply.
            pass
        finally:
            with self._lock:
                del self._open[connection]
            connection.close()


class PlainConnection(Connection):
    """A connection to a `PlainServer`; see `Connection`."""

    encrypted = False

    def __init__(self, location: TcpLocation) -> None:
        super().__init__(location)
        self._address = (location.host.strip("[]"), location.port)
        self._connection: socket.socket | None = None

    def send(self, ask: ReadRequest) -> None:
        """Send a request without waiting for a reply. If the server is not there, `receive` reports it."""
        with contextlib.suppress(OSError):
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=RECONNECT_SECONDS)
                _tune(self._connection)
            _send(self._connection, msgspec.msgpack.encode(ask))

    def receive(self, patience: float, into: Into) -> ReadReply | None:
        """See `Connection.receive`."""
        if self._connection is None:
            time.sleep(RECONNECT_SECONDS)
            return None
        whole = False
        try:
            answer = self._received(self._connection, time.monotonic() + patience, into)
            whole = True
            return answer
        except TimeoutError:
            raise self._silent(patience) from None
        except OSError:
            return None
        finally:
            # In the middle of a message, the bytes that follow cannot be interpreted.
            if not whole:
                self._disconnect()

    def drop_old_answers(self) -> None:
        """See `Connection.drop_old_answers`."""
        if self._connection is not None and _at_end(self._connection):
            self._disconnect()

    def close(self) -> None:
        """See `Connection.close`."""
        self._disconnect()

    def _received(self, connection: socket.socket, deadline: float, into: Into) -> ReadReply:
        header, nbytes = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size, deadline))
        if header > _LARGEST_HEADER:
            raise DeliveryError(f"the server at {self.endpoint} does not speak of weights")
        answer = self._decode(_exactly(connection, header, deadline))
        target = into(answer, nbytes)
        if target is not None:
            _fill(connection, target, deadline)
            return answer
        scratch = memoryview(bytearray(min(nbytes, _DROPPED)))
        while nbytes:
            _fill(connection, scratch[: min(nbytes, _DROPPED)], deadline)
            nbytes -= min(nbytes, _DROPPED)
        return answer

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for way in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, way, BUFFERED)


def _request(connection: socket.socket) -> bytes | None:
    """Read the client's next request; None if the client has left or does not speak this protocol."""
    start = connection.recv(_LENGTHS.size, socket.MSG_WAITALL)
    if len(start) < _LENGTHS.size:
        return None
    header, nbytes = _LENGTHS.unpack(start)
    if header > _LARGEST_HEADER or nbytes:
        return None
    request = connection.recv(header, socket.MSG_WAITALL)
    return request if len(request) == header else None


def _send(connection: socket.socket, header: bytes, payload: Any = b"") -> None:
    connection.sendall(_LENGTHS.pack(len(header), len(payload)) + header)
    if isinstance(payload, MemorySlice) and payload.file >= 0:
        _send_file(connection, payload)
    elif payload:
        connection.sendall(payload.view if isinstance(payload, MemorySlice) else payload)


def _send_file(connection: socket.socket, payload: MemorySlice) -> None:
    sent = 0
    while sent < len(payload):
        count = os.sendfile(connection.fileno(), payload.file, payload.start + sent, len(payload) - sent)
        if not count:
            raise ConnectionResetError("the other end was closed")
        sent += count


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytearray:
    found = bytearray(count)
    _fill(connection, memoryview(found), deadline)
    return found


def _fill(connection: socket.socket, target: memoryview, deadline: float) -> None:
    while target:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the other end was closed")
        target = target[count:]


def _at_end(connection: socket.socket) -> bool:
    """Return whether the other end has closed an idle connection, on which there is nothing else to read."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _shut(connection: socket.socket) -> None:
    """Shut the connection down, which wakes a thread that waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
