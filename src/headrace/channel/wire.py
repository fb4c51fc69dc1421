"""The envelope: what kind of message this is, which request it belongs to, and the class that decodes it."""

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
    """Of the request that this is, or answers; 0 for an event."""
    tag: str
    """The message's class; for an error, empty."""


class Failure(Message):
    """The body of an error reply: one line."""

    text: str


def pack(kind: Kind, request_id: int, message: Message) -> list[Frame]:
    """A message as frames."""
    return [msgspec.msgpack.encode(Header(kind, request_id, type(message).__name__)), *encode(message)]


def unpack(frames: Sequence[zmq.Frame]) -> tuple[Header, Message]:
    """The header and message in these frames; arrays are views of the received memory."""
    buffers = [frame.buffer for frame in frames]
    try:
        header = msgspec.msgpack.decode(bytes(buffers[0]), type=Header)
    except (msgspec.DecodeError, IndexError) as error:
        raise ChannelError(f"a frame that is no header was received: {error}") from error
    kind = Message.registry.get(header.tag)
    if kind is None:
        raise ChannelError(f"a message of unknown class {header.tag!r} was received")
    return header, decode(kind, buffers[1:])
