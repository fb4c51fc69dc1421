"""This module encodes a message as frames: a header, a msgpack body, the small arrays, and each large array.

Large arrays are not copied. Small arrays are, because a frame of its own costs more than the copy: the tokens of a
hundred sequences are several hundred small arrays. A message is a subclass of `Message`. Its class name is its tag on
the wire, and only declared classes can be decoded. Nothing is ever pickled. A message that cannot be encoded or decoded
raises `ChannelError`.
"""

from __future__ import annotations

import functools
import math
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

PROTOCOL = 2
"""The number of the present set of messages. A change after which older processes would misread a message raises it."""
SMALL_BYTES = 4096
"""Arrays of fewer bytes share a frame."""
ALIGNMENT = 8
"""Arrays in the shared frame begin at multiples of so many bytes."""
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
    """Return the frames of a message: its body, the small arrays, and then each large array.

    The body has the type, the shape, the frame and the offset in this frame of every array. Raises `ChannelError`, for
    example if a whole number has more than 64 bits.
    """
    small, large = list[bytes](), list[Frame]()
    end = 0

    def hook(value: Any) -> Any:
        nonlocal end
        if isinstance(value, np.ndarray):
            if value.nbytes < SMALL_BYTES:
                small.append(value.tobytes())
                start, padding = end, -value.nbytes % ALIGNMENT
                small.append(b"\0" * padding)
                end += value.nbytes + padding
                return [value.dtype.str, value.shape, 0, start]
            contiguous = np.ascontiguousarray(value)
            large.append(contiguous.data.cast("B"))
            return [contiguous.dtype.str, contiguous.shape, len(large), 0]
        if isinstance(value, np.generic):
            return value.item()
        raise ChannelError(f"cannot send a {type(value).__name__}")

    try:
        body = msgspec.msgpack.encode(message, enc_hook=hook)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise ChannelError(f"a {type(message).__name__} cannot be sent: {error}") from error
    return [body, b"".join(small), *large]


@functools.lru_cache(maxsize=64)
def _numbers(name: str) -> np.dtype[Any]:
    """Return the type of numbers with this name. Raises `ValueError` for any other type of array."""
    if not re.fullmatch(r"[<>|=]?[biufc]\d{1,2}", name):
        raise ValueError(f"an array of {name!r}")
    return np.dtype(name)


def decode(kind: type[T], frames: Sequence[Frame]) -> T:
    """Return the message of this class. Its arrays are read-only views of the frames. Raises `ChannelError`."""

    def hook(expected: type, value: Any) -> Any:
        dtype, shape, frame, offset = value
        count = math.prod(shape)
        if count <= 0:
            return np.zeros(shape, _numbers(dtype))
        return np.frombuffer(frames[1 + frame], _numbers(dtype), count, offset).reshape(shape)

    try:
        return msgspec.msgpack.decode(bytes(frames[0]), type=kind, dec_hook=hook)
    except (msgspec.DecodeError, ValueError, IndexError, TypeError, OverflowError, RecursionError) as error:
        raise ChannelError(f"a {kind.__name__} message could not be decoded: {error}") from error
