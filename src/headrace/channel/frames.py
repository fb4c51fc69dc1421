"""Frames between a process and a worker of its own, over two pipes: an id, a length, and a body of JSON.

An answer carries the id of its question. JSON and not msgpack, whose whole numbers end at 64 bits: what a line of a
dataset can hold, a frame can hold.
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO, TypeVar

import msgspec

HEADER = struct.Struct("<QI")
"""The id of the question, and the length of the body."""
GREETING = 0
"""The id of a worker's first frame and of the `WorkerReady` that answers it. Questions count from 1."""

T = TypeVar("T")


class WorkerReady(msgspec.Struct, kw_only=True):
    """The first frame from a worker: the worker is ready, or `error` says why it never will be."""

    error: str = ""


def encode(message: msgspec.Struct) -> bytes:
    """A message as the body of a frame. Raises `TypeError` or `ValueError` if the message holds what JSON cannot."""
    return msgspec.json.encode(message)


def decode(body: bytes, kind: type[T]) -> T:
    """The message in a frame's body."""
    return msgspec.json.decode(body, type=kind)


def pack(id: int, body: bytes) -> bytes:
    """A frame. An empty body, in place of a question, says that nobody waits for that question's answer any more."""
    return HEADER.pack(id, len(body)) + body


def read(stream: BinaryIO) -> tuple[int, bytes] | None:
    """The id and body of the next frame of a blocking stream; None at the stream's end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    id, length = HEADER.unpack(header)
    body = stream.read(length)
    return (id, body) if len(body) == length else None


async def receive(stream: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """The id and body of the next frame; None at the stream's end. The caller owns this wait."""
    try:
        id, length = HEADER.unpack(await stream.readexactly(HEADER.size))
        return id, await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
