"""The envelope of a message: its kind, the request that it belongs to, and the class that decodes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import zmq

from headrace.channel.codec import Frame, Message, decode, encode
from headrace.errors import ChannelError

Kind = Literal["event", "request", "reply", "error"]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every message."""

    kind: Kind
    id: int
    """The id of the request that this message is, or answers; 0 for an event."""
    tag: str
    """The name of the message's class."""


class Failure(Message):
    """The body of an error reply: one line of text."""

    text: str


def pack(kind: Kind, request_id: int, message: Message) -> list[Frame]:
    """Encode a message as frames."""
    return [msgspec.msgpack.encode(Header(kind, request_id, type(message).__name__)), *encode(message)]


def unpack(frames: Sequence[zmq.Frame]) -> tuple[Header, Message]:
    """Decode the header and the message. Arrays are views of the received memory. Raises `ChannelError`."""
    buffers = [frame.buffer for frame in frames]
    try:
        header = msgspec.msgpack.decode(bytes(buffers[0]), type=Header)
    except (msgspec.DecodeError, IndexError) as error:
        raise ChannelError(f"a frame that is no header was received: {error}") from error
    kind = Message.registry.get(header.tag)
    if kind is None:
        raise ChannelError(f"a message of unknown class {header.tag!r} was received")
    return header, decode(kind, buffers[1:])
