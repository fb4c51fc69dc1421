"""The two byte paths of the `tcp` transport. Every wait of a client has a deadline.

On loopback, plain sockets carry bytes from the served memory directly into the memory to fill, and every request
carries a key that only processes of the run know. Where the served memory is also a file, the kernel sends its pages
without copying them first. A message is the lengths of its header and its bytes, then the header, then the bytes. Every
connection has its own server thread, so a client that sends nonsense or does not read cannot disturb other clients.

Beyond loopback, ZeroMQ's CURVE encrypts every byte and authenticates both ends with the keys of the run. Nothing that a
client sends can end the thread that answers, and a client that proves no key is soon disconnected.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from headrace.channel.strangers import bear_strangers
from headrace.channel.vital import vital_thread
from headrace.delivery.transports.tcp_wire import (
    MemorySlice,
    ReadReply,
    ReadRequest,
    RunKeys,
    TcpLocation,
    loopback_key,
    read_keys,
)
from headrace.errors import DeadlineError, DeliveryError

RECONNECT_SECONDS = 0.1
BUFFERED = 1 << 20
"""The size of the socket buffers. It is small, so that bytes are read while they are still in a cache."""
_CLOSE_SECONDS = 10.0
_LENGTHS = struct.Struct("<IQ")
_LARGEST_HEADER = 1 << 16
_DROPPED = 1 << 20
"""Unwanted bytes are read and dropped in pieces of this size."""
_POLL_MS = 100
_ZAP_DOMAIN = "headrace"
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Respond = Callable[[list[bytes]], list[Any]]
"""A function from the frames of a request to the frames of its reply: a header and, unless it is a refusal, bytes or a
`MemorySlice`."""
Into = Callable[[ReadReply, int], memoryview | None]
"""A function that gets a reply and its number of bytes, and returns the memory for the bytes; None drops them."""


class ByteServer(ABC):
    """A server that answers requests in the background, from its creation until `close`."""

    encrypted: bool
    _port: int

    def __init__(self, bind: str, respond: Respond) -> None:
        self._host = f"[{bind}]" if ":" in bind else bind
        self._respond = respond
        self._lock = threading.Lock()

    def location(self, place: int, *, tree: bool = False) -> TcpLocation:
        """Return the location by which clients find this place of the server."""
        return TcpLocation(self.encrypted, self._host, self._port, place, tree)

    @abstractmethod
    def close(self) -> None:
        """Stop answering and release the port; raises `DeadlineError` if a thread does not end in time. Idempotent."""

    def _join(self, thread: threading.Thread) -> None:
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            raise DeadlineError(f"the server of weights on port {self._port} did not end within {_CLOSE_SECONDS:g} s")


class Connection(ABC):
    """A client's connection to one server, which is made again when it breaks. Used by one thread at a time."""

    def __init__(self, location: TcpLocation) -> None:
        self.endpoint = location.endpoint
        self.server = location.endpoint, location.encrypted
        """What the connection is to; a connection that encrypts does not serve for one that does not."""

    @abstractmethod
    def send(self, ask: ReadRequest) -> None:
        """Send a request without waiting for a reply."""

    @abstractmethod
    def receive(self, patience: float, into: Into) -> ReadReply | None:
        """Return the next reply, or None if the connection broke; `into` says where the reply's bytes go.

        Raises `DeliveryError` if no reply comes within `patience` seconds, and any error that `into` raises.
        """

    def drop_old_answers(self) -> None:  # noqa: B027
        """Forget that the connection broke while it was idle: that says nothing about the next fetch.

        A plain socket tells of a break only once.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def _decode(self, header: memoryview) -> ReadReply:
        try:
            return msgspec.msgpack.decode(header, type=ReadReply)
        except msgspec.DecodeError as error:
            raise DeliveryError(f"the server at {self.endpoint} does not speak of weights: {error}") from error

    def _silent(self, patience: float) -> DeliveryError:
        return DeliveryError(f"the server at {self.endpoint} said nothing for {patience:.3g} s")


def serve(bind: str, keys: RunKeys | None, respond: Respond) -> ByteServer:
    """Start a server on `bind`, an address of this host; it encrypts, and authenticates its clients, if there are keys.

    Raises `OSError` if the server cannot listen there.
    """
    return _PlainServer(bind, respond) if keys is None else _CurveServer(bind, keys, respond)


def connect(location: TcpLocation, keys: Path | None) -> Connection:
    """Begin to connect to a server; `keys` is the file with the keys of the run, for a server that encrypts."""
    if location.encrypted:
        return _CurveConnection(location, keys)
    key = loopback_key(read_keys(keys), location.port) if keys is not None and keys.is_file() else ""
    return PlainConnection(location, key)


class _PlainServer(ByteServer):
    encrypted = False

    def __init__(self, bind: str, respond: Respond) -> None:
        super().__init__(bind, respond)
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = False
        self._bind = bind
        self._listener = socket.create_server((bind, 0), family=socket.AF_INET6 if ":" in bind else socket.AF_INET)
        self._port = int(self._listener.getsockname()[1])
        self._thread = vital_thread(self._accept, name="weights")
        self._thread.start()

    def close(self) -> None:
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
    """A connection through plain sockets; see `Connection`."""

    def __init__(self, location: TcpLocation, key: str = "") -> None:
        super().__init__(location)
        self._key = key
        self._address = (location.host.strip("[]"), location.port)
        self._connection: socket.socket | None = None

    def send(self, ask: ReadRequest) -> None:
        """Send a request without waiting for a reply. If the server is not there, `receive` reports it."""
        with contextlib.suppress(OSError):
            if self._connection is None:
                self._connection = socket.create_connection(self._address, timeout=RECONNECT_SECONDS)
                _tune(self._connection)
            _send(self._connection, msgspec.msgpack.encode(msgspec.structs.replace(ask, key=self._key)))

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
                self.close()

    def close(self) -> None:
        """See `Connection.close`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _received(self, connection: socket.socket, deadline: float, into: Into) -> ReadReply:
        header, nbytes = _LENGTHS.unpack(_fill(connection, memoryview(bytearray(_LENGTHS.size)), deadline))
        if header > _LARGEST_HEADER:
            raise DeliveryError(f"the server at {self.endpoint} does not speak of weights")
        answer = self._decode(_fill(connection, memoryview(bytearray(header)), deadline))
        target = into(answer, nbytes)
        if target is not None:
            _fill(connection, target, deadline)
            return answer
        scratch = memoryview(bytearray(min(nbytes, _DROPPED)))
        while nbytes:
            _fill(connection, scratch[: min(nbytes, _DROPPED)], deadline)
            nbytes -= min(nbytes, _DROPPED)
        return answer


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
        sent = 0
        while sent < len(payload):
            count = os.sendfile(connection.fileno(), payload.file, payload.start + sent, len(payload) - sent)
            if not count:
                raise ConnectionResetError("the other end was closed")
            sent += count
    elif payload:
        connection.sendall(payload.view if isinstance(payload, MemorySlice) else payload)


def _fill(connection: socket.socket, target: memoryview, deadline: float) -> memoryview:
    filled = target
    while target:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        count = connection.recv_into(target)
        if not count:
            raise ConnectionResetError("the other end was closed")
        target = target[count:]
    return filled


def _shut(connection: socket.socket) -> None:
    """Shut the connection down, which wakes a thread that waits in it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _CurveServer(ByteServer):
    encrypted = True

    def __init__(self, bind: str, keys: RunKeys, respond: Respond) -> None:
        super().__init__(bind, respond)
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        try:
            self._socket = self._listen(keys)
        except zmq.ZMQError as error:
            self._end_context()
            raise OSError(error.errno, error.strerror) from error
        self._port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = vital_thread(self._serve, name="weights")
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._join(self._thread)
        with self._lock:
            if not self._context.closed:
                self._end_context()

    def _listen(self, keys: RunKeys) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.IPV6, self._host.startswith("["))
        # It must run before the socket is bound, because without it ZeroMQ accepts every client that knows the
        # server's public key.
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        client = keys.client_public.encode()
        only_the_run = SimpleNamespace(callback=lambda domain, key: key == client)
        self._authenticator.configure_curve_callback(_ZAP_DOMAIN, only_the_run)
        router.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN.encode())
        bear_strangers(router, _LARGEST_HEADER)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        router.bind(f"tcp://{self._host}:*")
        return router

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


class _CurveConnection(Connection):
    def __init__(self, location: TcpLocation, keys: Path | None) -> None:
        super().__init__(location)
        run_keys = read_keys(keys)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, round(1000 * RECONNECT_SECONDS))
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
        try:
            self._socket.send(msgspec.msgpack.encode(ask), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise DeliveryError(f"the server at {self.endpoint} is gone: nothing can be sent to it") from error

    def receive(self, patience: float, into: Into) -> ReadReply | None:
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
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.destroy(linger=0)
