"""The messages that the two ends of the `nccl` transport exchange through a key-value store.

Every request names the write that it is about, and the pieces of a broadcast are a pure function of the plan, so nobody
receives bytes of two writes or in another order. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from headrace.delivery.base import Entry
from headrace.delivery.plan import packed_bytes
from headrace.delivery.transports.tcp_wire import is_loopback
from headrace.errors import DeliveryError

BUCKET_BYTES = 64 << 20
"""The bytes of one broadcast call."""
ASKS = "asks"
"""The key of the store's request counter."""
_LOCATION = re.compile(r"(nccl|gloo)://([0-9.]+):(\d+)/(\d+)")


class HeldVersion(msgspec.Struct, frozen=True, array_like=True):
    """The version that a place holds, as kept in the store under `held_key`."""

    version: int = -1
    sequence: int = 0
    """The number of the write that filled the place."""
    nbytes: int = 0
    whole: bool = False
    """Whether the version is completely written and not released."""


class BroadcastRequest(msgspec.Struct, frozen=True, array_like=True):
    """An engine's request for a version. The reply is put under `answer_key` with the number of the request."""

    receiver: str
    place: int
    version: int
    sequence: int
    group: str
    """The key of the group that the engine is still in, or an empty string."""


class BroadcastReply(msgspec.Struct, frozen=True, array_like=True):
    """The broadcast that an engine must join, or a refusal."""

    session: int = 0
    group: str = ""
    """The key of the group. The engine forms this group unless it is still in it."""
    rank: int = 0
    size: int = 0
    bucket_bytes: int = 0
    """The bytes of one broadcast call; 0 means tensor by tensor."""
    refusal: str = ""


class NcclLocation(msgspec.Struct, frozen=True):
    """A place of a sender, and the backend that broadcasts its bytes."""

    backend: str
    host: str
    port: int
    place: int

    def __str__(self) -> str:
        return f"{self.backend}://{self.host}:{self.port}/{self.place}"


def parse_location(text: str) -> NcclLocation:
    """Parse the location in a manifest. Broadcasts are not encrypted, so a location beyond this host is refused."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the nccl transport")
    if not is_loopback(match[2]):
        raise DeliveryError(f"{text} is beyond this host, and a broadcast is not encrypted")
    return NcclLocation(match[1], match[2], int(match[3]), int(match[4]))


def held_key(place: int) -> str:
    """Return the key of what a place holds."""
    return f"held/{place}"


def ask_key(number: int) -> str:
    """Return the key of a request; numbers begin with 1."""
    return f"ask/{number}"


def answer_key(number: int) -> str:
    """Return the key of the reply to a request."""
    return f"answer/{number}"


def joined_key(session: int, rank: int) -> str:
    """Return the key under which a member says that it has joined."""
    return f"joined/{session}/{rank}"


def begin_key(session: int) -> str:
    """Return the key under which the sender says `yes` when all members joined, or else what is missing."""
    return f"begin/{session}"


def pieces(entries: Sequence[Entry], bucket_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges to broadcast, in order: buckets of the packed bytes, or tensors if `bucket_bytes` is 0."""
    if bucket_bytes:
        nbytes = packed_bytes(entries)
        return [(start, min(nbytes, start + bucket_bytes)) for start in range(0, nbytes, bucket_bytes)]
    return [(entry.offset, entry.offset + entry.nbytes) for entry in entries if entry.nbytes]
