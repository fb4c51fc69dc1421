"""The messages of the `tcp` transport: requests for byte ranges of one version, and replies or refusals.

A request for bytes names everything that it depends on, so a server keeps no state for it: a client that dies or asks
again changes nothing for other clients. This module does not import torch.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import DeliveryError

BUCKET_BYTES = 4 << 20
"""The bytes that one message carries. On loopback 4 and 8 MiB are equally fast, and 1 MiB is a third slower."""
LARGEST_BUCKET = 64 << 20
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
