"""This module encodes a message as frames: one msgpack body, then each array as a frame of its own, without a copy.

A message is a subclass of `Message`. Its class name is its tag on the wire, and only declared classes can be decoded.
Nothing is ever pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from headrace.errors import ChannelError

Frame = bytes | memoryview
T = TypeVar("T", bound=msgspec.Struct)


class Message(msgspec.Struct, kw_only=True):
    """The base class of every message on a channel. Fields may be arrays, and structs that hold arrays."""

    registry: ClassVar[dict[str, type[Message]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Message.registry[cls.__name__] = cls


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
