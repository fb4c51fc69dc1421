"""What the two ends of the `nccl` transport say to each other through a store: who wants what, who is in a broadcast.

Every message names the write that it is about, and the pieces of a broadcast are a pure function of the plan, so that
nobody receives bytes of two writes or in another order. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from headrace.delivery.base import Entry
from headrace.delivery.transports.tcp_wire import is_loopback
from headrace.errors import DeliveryError

BUCKET_BYTES = 64 << 20
"""The bytes of one broadcast."""
ASKS = "asks"
"""The store's counter of questions."""
_LOCATION = re.compile(r"(nccl|gloo)://([0-9.]+):(\d+)/(\d+)")


class HeldVersion(msgspec.Struct, frozen=True, array_like=True):
    """What a place holds, kept in the store under `held_key`."""

    version: int = -1
    sequence: int = 0
    """Of the write that made it."""
    nbytes: int = 0
    whole: bool = False


class BroadcastRequest(msgspec.Struct, frozen=True, array_like=True):
    """An engine wants a version. The answer comes under `answer_key` of the question's number."""

    receiver: str
    place: int
    version: int
    sequence: int
    group: str
    """The group that it still holds, or an empty string."""


class BroadcastReply(msgspec.Struct, frozen=True, array_like=True):
    """The broadcast that an engine is to join, or a refusal."""

    session: int = 0
    group: str = ""
    """To be formed, unless the engine named it in its question."""
    rank: int = 0
    size: int = 0
    bucket_bytes: int = 0
    """0: tensor by tensor."""
    refusal: str = ""


class NcclLocation(msgspec.Struct, frozen=True):
    """A place of a sender, and how its bytes are broadcast."""

    backend: str
    host: str
    port: int
    place: int

    def __str__(self) -> str:
        return f"{self.backend}://{self.host}:{self.port}/{self.place}"


def parse_location(text: str) -> NcclLocation:
    """The location that a manifest names; one beyond this host is refused, for its bytes would travel in the clear."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the nccl transport")
    if not is_loopback(match[2]):
        raise DeliveryError(f"{text} is beyond this host, and a broadcast is not encrypted")
    return NcclLocation(match[1], match[2], int(match[3]), int(match[4]))


def held_key(place: int) -> str:
    """Where the store says what a place holds."""
    return f"held/{place}"


def ask_key(number: int) -> str:
    """Where question `number`, from 1, is put."""
    return f"ask/{number}"


def answer_key(number: int) -> str:
    """Where its answer is put."""
    return f"answer/{number}"


def joined_key(session: int, rank: int) -> str:
    """Where a member says that it is there."""
    return f"joined/{session}/{rank}"


def begin_key(session: int) -> str:
    """Where the sender says that all are there (`yes`), or who is not."""
    return f"begin/{session}"


def pieces(entries: Sequence[Entry], bucket_bytes: int) -> list[tuple[int, int]]:
    """The byte ranges that are broadcast, in order: buckets of the packed bytes, or with 0 the tensors."""
    if bucket_bytes:
        nbytes = max(entry.offset + entry.nbytes for entry in entries)
        return [(start, min(nbytes, start + bucket_bytes)) for start in range(0, nbytes, bucket_bytes)]
    return [(entry.offset, entry.offset + entry.nbytes) for entry in entries if entry.nbytes]
