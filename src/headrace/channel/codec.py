"""This module encodes a message as frames: a header, one msgpack body, then each array as a frame of its own.

Arrays are not copied. A message is a subclass of `Message`. Its class name is its tag on the wire, and only declared
classes can be decoded. Nothing is ever pickled. A message that cannot be encoded or decoded raises `ChannelError`.
"""

from __future__ import annotations

import functools
import re
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

PROTOCOL = 1
"""The number of the present set of messages. A change after which older processes would misread a message raises it."""
MESSAGE_BYTES = 1 << 30
"""The largest message that is sent or accepted, in bytes."""


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
    """Encode a message with its header as frames. Raises `ChannelError`."""
    frames = [msgspec.msgpack.encode(Header(kind, request_id, type(message).__name__)), *encode(message)]
    if (size := sum(map(len, frames))) > MESSAGE_BYTES:
        raise ChannelError(
            f"a {type(message).__name__} message of {size:,} bytes is over the limit of {MESSAGE_BYTES:,}"
        )
    return frames


def unpack(frames: Sequence[zmq.Frame]) -> tuple[Header, Message]:
    """Decode the header and the message. Arrays are views of the received memory. Raises `ChannelError`."""
    header = unpack_header(frames)
    return header, unpack_body(header, frames)


def unpack_header(frames: Sequence[zmq.Frame]) -> Header:
    """Decode the header alone. Raises `ChannelError`."""
    try:
        return msgspec.msgpack.decode(bytes(frames[0].buffer), type=Header)
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        raise ChannelError(f"a message has no header: {error}") from error


def unpack_body(header: Header, frames: Sequence[zmq.Frame]) -> Message:
    """Decode the message that follows this header. Raises `ChannelError`."""
    kind = Message.registry.get(header.tag)
    if kind is None:
        raise ChannelError(f"a message has the unknown class {header.tag!r}")
    return decode(kind, [frame.buffer for frame in frames[1:]])


def encode(message: msgspec.Struct) -> list[Frame]:
    """Return the frames of a message: its body, then its arrays in the order in which the encoder met them.

    Raises `ChannelError`, for example if a whole number has more than 64 bits.
    """
    arrays: list[Frame] = []

    def hook(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            contiguous = np.ascontiguousarray(value)
            arrays.append(contiguous.data.cast("B") if contiguous.size else b"")
            return [contiguous.dtype.str, contiguous.shape, len(arrays) - 1]
        if isinstance(value, np.generic):
            return value.item()
        raise ChannelError(f"cannot send a {type(value).__name__}")

    try:
        body = msgspec.msgpack.encode(message, enc_hook=hook)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ChannelError(f"a {type(message).__name__} cannot be sent: {error}") from error
    return [body, *arrays]


@functools.lru_cache(maxsize=64)
def _numbers(name: str) -> np.dtype[Any]:
    """Return the type of numbers with this name. Raises `ValueError` for any other type of array."""
    if not re.fullmatch(r"[<>|=]?[biufc]\d{1,2}", name):
        raise ValueError(f"an array of {name!r}")
    return np.dtype(name)


def decode(kind: type[T], frames: Sequence[Frame]) -> T:
    """Return the message of this class. Its arrays are read-only views of the frames. Raises `ChannelError`."""

    def hook(expected: type, value: Any) -> Any:
        dtype, shape, index = value
        return np.frombuffer(frames[1 + index], dtype=_numbers(dtype)).reshape(shape)

    try:
        return msgspec.msgpack.decode(bytes(frames[0]), type=kind, dec_hook=hook)
    except (msgspec.DecodeError, ValueError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise ChannelError(f"a {kind.__name__} message could not be decoded: {error}") from error
