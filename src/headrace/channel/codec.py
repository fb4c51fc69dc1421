"""This module encodes a message as frames: a header, one msgpack body, then each array as a frame of its own.

Arrays are not copied. A message is a subclass of `Message`. Its class name is its tag on the wire, and only declared
classes can be decoded. Nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec
import numpy as np

from headrace.errors import ChannelError

if TYPE_CHECKING:
    import zmq

Frame = bytes | memoryview
Kind = Literal["event", "request", "reply", "error"]
T = TypeVar("T", bound=msgspec.Struct)


class Message(msgspec.Struct, kw_only=True):
    """The base class of every message on a channel. Fields may be arrays, and structs that hold arrays."""

    registry: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Message.registry[cls.__name__] = cls


class Header(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of every message between processes."""

    kind: Kind
    id: int
    """The id of the request that this message is, or answers; 0 for an event."""
    tag: str
    """The name of the message's class."""


class Failure(Message):
    """The body of an error reply: one line of text."""

    text: str


def pack(kind: Kind, request_id: int, message: Message) -> list[Frame]:
    """Encode a message with its header as frames."""
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


def encode(message: msgspec.Struct) -> list[Frame]:
    """Return the frames of a message: its body, then its arrays in the order in which the encoder met them."""
    arrays: list[Frame] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            contiguous = np.ascontiguousarray(value)
            arrays.append(contiguous.data.cast("B") if contiguous.size else b"")
            return [contiguous.dtype.str, contiguous.shape, len(arrays) - 1]
        if isinstance(value, np.generic):
            return value.item()
        raise ChannelError(f"cannot send a {type(value).__name__}")

    body = msgspec.msgpack.encode(message, enc_hook=hook)
    return [body, *arrays]


def decode(kind: type[T], frames: Sequence[Frame]) -> T:
    """Return the message of this class. Its arrays are read-only views of the frames. Raises `ChannelError`."""

    def hook(expected: type, value: Any) -> Any:
        dtype, shape, index = value
        return np.frombuffer(frames[1 + index], dtype=np.dtype(dtype)).reshape(shape)

    try:
        return msgspec.msgpack.decode(bytes(frames[0]), type=kind, dec_hook=hook)
    except (msgspec.DecodeError, ValueError, IndexError, TypeError) as error:
        raise ChannelError(f"a {kind.__name__} message could not be decoded: {error}") from error
