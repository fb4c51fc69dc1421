"""What the two ends of the `tcp` transport say to each other: byte ranges of one version, or a refusal.

A request for bytes names everything that it depends on, so a server keeps no state for it: a client that dies or asks
again changes nothing for the others. No torch here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import DeliveryError

BUCKET_BYTES = 4 << 20
"""The bytes that one message carries. On loopback 4 and 8 MiB are alike and 1 MiB is a third slower."""
LARGEST_BUCKET = 64 << 20
_LOCATION = re.compile(r"(tcp|curve)://(\[[0-9a-fA-F:.]+\]|[0-9.]+):(\d+)/(\d+)(/tree)?")


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Send the bytes `start .. stop` of this place, if it holds this version; no bytes ask only whether it does."""

    ticket: int
    """Comes back with the answer, so that answers to a fetch that was given up are known as such."""
    place: int
    version: int
    start: int
    stop: int
    engine: str = ""
    """In a tree: who asks. Together with no bytes: from whom should I fetch?"""
    offer: str = ""
    """In a tree: where this engine serves the version to others now."""
    lost: str = ""
    """In a tree: an offer that did not hold what it promised."""


class ReadReply(msgspec.Struct, frozen=True, array_like=True):
    """The header of an answer; the bytes follow as a frame of their own unless it is a refusal."""

    ticket: int
    start: int
    stop: int
    sequence: int
    """Of the write that made these bytes: two answers with one sequence belong together."""
    nbytes: int
    """Of the whole version."""
    refusal: str = ""
    parent: str = ""
    """In a tree: the location to fetch from; empty: this server."""
    wait: bool = False
    """In a tree: others fetch now, and will serve; ask again."""


Respond = Callable[[list[bytes]], list[Any]]
"""From the frames of a request to those of its answer: a header, and bytes or a `Part` unless it is a refusal."""
Into = Callable[[ReadReply, int], memoryview | None]
"""Where the bytes of an answer, so many, are to go; None if nobody wants them."""


class TcpLocation(msgspec.Struct, frozen=True):
    """A place of a server."""

    encrypted: bool
    host: str
    port: int
    place: int
    tree: bool = False
    """Ask the server whom to fetch from: others that have the version serve it too."""

    @property
    def endpoint(self) -> str:
        """What a client connects to."""
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        scheme, tree = "curve" if self.encrypted else "tcp", "/tree" if self.tree else ""
        return f"{scheme}://{self.host}:{self.port}/{self.place}{tree}"


def parse_location(text: str) -> TcpLocation:
    """The location that a manifest names; one that would travel in the clear beyond this host is refused."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the tcp transport")
    location = TcpLocation(match[1] == "curve", match[2], int(match[3]), int(match[4]), match[5] is not None)
    if not location.encrypted and not is_loopback(location.host.strip("[]")):
        raise DeliveryError(f"{text} is beyond this host and not encrypted")
    return location


def is_loopback(address: str) -> bool:
    """Whether this IP address never leaves the host."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise DeliveryError(f"{address!r} is not an IP address") from error
