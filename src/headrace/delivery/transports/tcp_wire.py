"""The messages of the `tcp` transport, and what its two byte paths have in common.

A client requests byte ranges of one version, and a server replies or refuses. A request for bytes names everything that
it depends on, so a server keeps no state for it: a client that dies or asks again changes nothing for other clients.
On loopback the bytes travel through plain sockets (`tcp_plain`). Beyond loopback, ZeroMQ's CURVE encrypts them and
authenticates both ends (`tcp_curve`). This module does not import torch.
"""

from __future__ import annotations

import ipaddress
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import DeadlineError, DeliveryError

BUCKET_BYTES = 4 << 20
"""The bytes that one message carries. On loopback 4 and 8 MiB are equally fast, and 1 MiB is a third slower."""
LARGEST_BUCKET = 64 << 20
_CLOSE_SECONDS = 10.0
_LOCATION = re.compile(r"(tcp|curve)://(\[[0-9a-fA-F:.]+\]|[0-9.]+):(\d+)/(\d+)(/tree)?")


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for the bytes `start .. stop` of a place, if the place holds this version.

    A request for no bytes only asks whether the place holds the version.
    """

    ticket: int
    """A number that comes back with the reply, so that replies to requests that were given up are recognised."""
    place: int
    version: int
    start: int
    stop: int
    engine: str = ""
    """In a tree: the name of the engine that asks. With no bytes, it asks whom to fetch from."""
    offer: str = ""
    """In a tree: the location where this engine now serves the version to others."""
    lost: str = ""
    """In a tree: the location of an offer that failed or was wrong."""


class ReadReply(msgspec.Struct, frozen=True, array_like=True):
    """The header of a reply. The bytes follow as a separate frame, unless the reply is a refusal."""

    ticket: int
    start: int
    stop: int
    sequence: int
    """The number of the write that made these bytes. Replies with the same number have bytes of the same write."""
    nbytes: int
    """The size of the whole version."""
    refusal: str = ""
    parent: str = ""
    """In a tree: the location to fetch from; empty means this server."""
    wait: bool = False
    """In a tree: whether to ask again later, because engines that fetch now will serve the version."""


@dataclass(frozen=True)
class MemorySlice:
    """Consecutive bytes of some memory, which are sent without copying them first."""

    view: memoryview
    """The bytes in place."""
    file: int = -1
    """A file descriptor of the same memory, if it has one."""
    start: int = 0
    """Where the slice begins in the file."""
    owner: object = None
    """An object that keeps the memory and the file alive."""

    def __len__(self) -> int:
        return len(self.view)

    def __bytes__(self) -> bytes:
        return bytes(self.view)


Respond = Callable[[list[bytes]], list[Any]]
"""A function from the frames of a request to the frames of its reply: a header and, unless it is a refusal, bytes or a
`MemorySlice`."""
Into = Callable[[ReadReply, int], memoryview | None]
"""A function that gets a reply and its number of bytes, and returns the memory for the bytes; None drops them."""


class TcpLocation(msgspec.Struct, frozen=True):
    """A place of a server."""

    encrypted: bool
    host: str
    port: int
    place: int
    tree: bool = False
    """Whether to ask the server whom to fetch from, because other engines that have the version serve it too."""

    @property
    def endpoint(self) -> str:
        """The address that a client connects to."""
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        scheme, tree = "curve" if self.encrypted else "tcp", "/tree" if self.tree else ""
        return f"{scheme}://{self.host}:{self.port}/{self.place}{tree}"


class ByteServer(ABC):
    """A server that answers requests in the background, from its creation until `close`."""

    encrypted: bool
    _port: int

    def __init__(self, bind: str) -> None:
        """Note the address on which the server will listen."""
        self._host = f"[{bind}]" if ":" in bind else bind

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

    encrypted: bool

    def __init__(self, location: TcpLocation) -> None:
        """Note the server to connect to."""
        self.endpoint = location.endpoint

    @abstractmethod
    def send(self, ask: ReadRequest) -> None:
        """Send a request without waiting for a reply."""

    @abstractmethod
    def receive(self, patience: float, into: Into) -> ReadReply | None:
        """Return the next reply, or None if the connection broke; `into` says where the reply's bytes go.

        Raises `DeliveryError` if no reply comes within `patience` seconds, and any error that `into` raises.
        """

    @abstractmethod
    def drop_old_answers(self) -> None:
        """Forget that the connection broke while it was idle: that says nothing about the next fetch."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    def _decode(self, header: bytearray | memoryview) -> ReadReply:
        try:
            return msgspec.msgpack.decode(header, type=ReadReply)
        except msgspec.DecodeError as error:
            raise DeliveryError(f"the server at {self.endpoint} does not speak of weights: {error}") from error

    def _silent(self, patience: float) -> DeliveryError:
        return DeliveryError(f"the server at {self.endpoint} said nothing for {patience:.3g} s")


def parse_location(text: str) -> TcpLocation:
    """Parse the location in a manifest; a location beyond this host that is not encrypted is refused."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the tcp transport")
    location = TcpLocation(match[1] == "curve", match[2], int(match[3]), int(match[4]), match[5] is not None)
    if not location.encrypted and not is_loopback(location.host.strip("[]")):
        raise DeliveryError(f"{text} is beyond this host and not encrypted")
    return location


def is_loopback(address: str) -> bool:
    """Return whether traffic to this IP address never leaves the host; raises `DeliveryError` if it is none."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise DeliveryError(f"{address!r} is not an IP address") from error
