"""What a reward worker and its owner say to each other: JSON bodies, each after its length, over two pipes.

JSON and not msgpack, whose whole numbers end at 64 bits: what a line of a dataset can hold, a frame can hold.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

from headrace.scoring.base import Judgement
from headrace.scoring.functions import Question

HEADER = struct.Struct("<I")

T = TypeVar("T")


class Setup(msgspec.Struct, kw_only=True):
    """The first frame to a worker: which function it serves."""

    reference: str
    arguments: dict[str, Any] | None = None
    """If given, the reference names a maker: called once with these, it returns the reward function."""


class Hello(msgspec.Struct, kw_only=True):
    """The first frame from a worker: ready, or why it never will be."""

    error: str = ""


class Answer(msgspec.Struct, kw_only=True):
    """The answer to one `Question`."""

    id: int
    """The question's."""
    judgement: Judgement | None = None
    error: str = ""


def pack(message: Setup | Hello | Question | Answer) -> bytes:
    """A message with its length before it."""
    body = msgspec.json.encode(message)
    return HEADER.pack(len(body)) + body


def read(stream: BinaryIO, kind: type[T]) -> T | None:
    """The next message of a blocking stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    return unpack(body, kind) if len(body) == length else None


def unpack(body: bytes, kind: type[T]) -> T:
    """The message in a frame's body."""
    return msgspec.json.decode(body, type=kind)
