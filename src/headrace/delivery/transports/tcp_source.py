"""Weights over TCP, an engine's end: buckets are asked for a few at a time and land where they are used.

Every wait has a deadline. A connection that breaks is made again and only the missing buckets are asked for again, also
by a later `open` of the same version; a server that is gone is an error within about a second.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from zmq.utils.monitor import recv_monitor_message

from headrace.delivery.base import Entry
from headrace.delivery.plan import Views
from headrace.delivery.transports.keys import read_keys
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES, Answer, Ask, Location, parse_location
from headrace.errors import DeliveryError

WINDOW = 4
"""Buckets asked for and not yet here: enough that the line never waits for a question."""
RESUMES = 6
"""Broken connections and refused attempts in a row after which the server is taken for dead."""
RECONNECT_MS = 100
_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Line:
    """A connection to one server. `receive` never waits beyond its deadline."""

    def __init__(self, context: zmq.Context[Any], location: Location, keys: Path | None) -> None:
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
        try:
            self._socket.send(msgspec.msgpack.encode(ask), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise DeliveryError(f"the server at {self.endpoint} is gone: nothing can be sent to it") from error

    def receive(self, patience: float) -> tuple[Answer, Any] | None:
        """The next answer and its bytes, or None when the connection broke. Raises when nothing comes in time."""
        ready = dict(self._poller.poll(round(patience * 1000)))
        if self._socket in ready:
            header, *payload = self._socket.recv_multipart(copy=False)
            return msgspec.msgpack.decode(header.buffer, type=Answer), payload[0].buffer if payload else b""
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
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class _Fetch:
    """What has arrived of one version."""

    def __init__(self, location: str, version: int, nbytes: int) -> None:
        self.key = (location, version, nbytes)
        self.sequence: int | None = None
        self.missing = deque(range(0, nbytes, BUCKET_BYTES))


class TcpSource:
    """An engine's end: one connection, one buffer of its own."""

    private = True

    def __init__(self, *, keys: Path | None = None, patience: float = 10.0) -> None:
        """`patience` is the longest wait for one bucket, in seconds."""
        self._keys = keys
        self._patience = patience
        self._context: zmq.Context[Any] | None = None
        self._line: _Line | None = None
        self._buffer: torch.Tensor | None = None
        self._views: Views | None = None
        self._fetch: _Fetch | None = None
        self._complete: tuple[str, int, int] | None = None
        self._ticket = 0

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Fetch the version; see `Source.open`."""
        nbytes = max(entry.offset + entry.nbytes for entry in entries)
        self._complete = None
        # What an attempt that failed has left here is used; what one that succeeded has is not: it may have been wrong.
        if self._fetch is None or self._fetch.key != (location, version, nbytes):
            self._fetch = _Fetch(location, version, nbytes)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
                self._views = Views(self._buffer)
        assert self._buffer is not None
        assert self._views is not None
        try:
            self._bring(self._fetch, self._buffer.numpy())
        except _Refused:
            self._fetch = None
            raise
        assert self._fetch.sequence is not None
        self._complete = (location, version, self._fetch.sequence)
        self._fetch = None
        return self._views.of(entries)

    def verify(self, location: str, version: int) -> None:
        """Ask whether the version is still there and no write came between."""
        if self._complete is None or self._complete[:2] != (location, version):
            raise DeliveryError(f"version {version} was not fetched from {location}")
        line = self._connected(parse_location(location))
        place = parse_location(location).place
        for _ in range(RESUMES):
            self._ticket += 1
            line.send(Ask(self._ticket, place, version, 0, 0))
            answer = self._awaited(line)
            if answer is not None:
                if answer[0].sequence != self._complete[2]:
                    raise DeliveryError(f"{location} was written again while version {version} was fetched")
                return
        raise DeliveryError(f"the server at {line.endpoint} is gone")

    def close(self) -> None:
        """Let go of the connection and the memory."""
        self._disconnect()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._buffer = self._views = self._fetch = self._complete = None

    def _bring(self, fetch: _Fetch, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        location, version, nbytes = fetch.key
        parsed = parse_location(location)
        line = self._connected(parsed)
        asked: set[int] = set()
        broken = 0
        self._ticket += 1
        while fetch.missing:
            for start in fetch.missing:
                if len(asked) >= WINDOW:
                    break
                if start not in asked:
                    line.send(Ask(self._ticket, parsed.place, version, start, min(nbytes, start + BUCKET_BYTES)))
                    asked.add(start)
            answer = self._awaited(line)
            if answer is None:
                broken += 1
                if broken > RESUMES:
                    self._disconnect()
                    raise DeliveryError(f"the server at {parsed.endpoint} is gone")
                asked.clear()
                self._ticket += 1
                continue
            broken = 0
            self._store(fetch, *answer, buffer)
            asked.discard(answer[0].start)

    def _awaited(self, line: _Line) -> tuple[Answer, Any] | None:
        """The next answer to what was asked last, not to what was given up before."""
        deadline = time.monotonic() + self._patience
        while True:
            received = line.receive(max(0.0, deadline - time.monotonic()))
            if received is None or received[0].ticket == self._ticket:
                if received is not None and received[0].refusal:
                    raise _Refused(f"the server at {line.endpoint} refused: {received[0].refusal}")
                return received

    def _store(self, fetch: _Fetch, answer: Answer, payload: Any, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        location, version, nbytes = fetch.key
        if fetch.sequence is None:
            fetch.sequence = answer.sequence
        if answer.sequence != fetch.sequence:
            raise _Refused(f"{location} was written again while version {version} was fetched")
        if answer.nbytes != nbytes:
            raise _Refused(f"version {version} at {location} has {answer.nbytes} bytes, not {nbytes}")
        if len(payload) != answer.stop - answer.start or answer.start not in fetch.missing:
            raise _Refused(f"{location} sent {len(payload)} bytes that were not asked for")
        buffer[answer.start : answer.stop] = np.frombuffer(payload, np.uint8)
        fetch.missing.remove(answer.start)

    def _connected(self, location: Location) -> _Line:
        if self._line is not None and (self._line.endpoint, self._line.encrypted) != (
            location.endpoint,
            location.encrypted,
        ):
            self._disconnect()
        if self._line is None:
            self._context = self._context or zmq.Context()
            self._line = _Line(self._context, location, self._keys)
        self._line.forget_the_past()
        return self._line

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class _Refused(DeliveryError):
    """The version cannot be had from there: nothing of the attempt is of use."""
