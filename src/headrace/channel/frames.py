"""Frames between a process and its own worker, over two pipes. A frame is an id, a length, and a JSON body.

An answer carries the id of its question. The body is JSON and not msgpack, because msgpack integers end at 64 bits: a
frame can hold every value that a line of a JSON dataset can hold.
"""

from __future__ import annotations

import asyncio
import struct
from typing import BinaryIO, TypeVar

import msgspec

HEADER = struct.Struct("<QI")
"""The header of a frame: the id of the question, and the length of the body."""
GREETING = 0
"""The id of the first frame to a worker, and of the `WorkerReady` that answers it. Questions count from 1."""

T = TypeVar("T")


class WorkerReady(msgspec.Struct, kw_only=True):
    """The first frame from a worker: the worker is ready, or `error` says why it never will be."""

    error: str = ""


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as the body of a frame. Raises `TypeError` or `ValueError` if JSON cannot hold the message."""
    return msgspec.json.encode(message)


def decode(body: bytes, kind: type[T]) -> T:
    """Decode the message in a frame's body."""
    return msgspec.json.decode(body, type=kind)


def pack(id: int, body: bytes) -> bytes:
    """Make a frame. A frame with an empty body cancels its question: nobody waits for that answer any more."""
    return HEADER.pack(id, len(body)) + body


def read(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Read the next frame of a blocking stream: its id and body, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    id, length = HEADER.unpack(header)
    body = stream.read(length)
    return (id, body) if len(body) == length else None


async def receive(stream: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """Wait for the next frame: its id and body, or None at the end of the stream. The caller owns this wait."""
    try:
        id, length = HEADER.unpack(await stream.readexactly(HEADER.size))
        return id, await stream.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
