"""Segments hold rollouts on disk: append-only files of checksummed records. Flushed bytes never change again.

    segments/000001.seg:  record record record ...
    record:   u32 payload bytes | u32 crc32 of the payload | payload
    payload:  u32 frames | u32 bytes of each frame | frames of `channel.codec.encode(rollout)`

All numbers are little-endian. A crash can leave half a record at the end of the last file; opening the segments cuts
this half off.
"""

import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.channel.codec import decode, encode
from headrace.errors import HeadraceError
from headrace.types import Rollout

ROLL_BYTES = 64 * 2**20
_HEADER = struct.Struct("<II")


class RecordLocation(NamedTuple):
    """The location of a record: the file name in `segments/`, and the bytes in that file."""

    segment: str
    offset: int
    length: int


class Segments:
    """The writing side of the segments, for one thread of one process."""

    def __init__(self, directory: Path, roll_bytes: int = ROLL_BYTES) -> None:
        self.directory = directory
        self._roll_bytes = roll_bytes
        directory.mkdir(parents=True, exist_ok=True)
        self._number = max((int(path.stem) for path in directory.glob("[0-9]" * 6 + ".seg")), default=1)
        if self._path().exists() and not _cut_torn_tail(self._path()):
            self._number += 1  # damaged inside, not at the end: keep the file and write to a new one
        self._open()

    def append(self, rollout: Rollout) -> RecordLocation:
        """Write a rollout. After the next `flush` it survives a crash of this process."""
        record = _record(rollout)
        if self._offset and self._offset + len(record) > self._roll_bytes:
            self._file.close()
            self._number += 1
            self._open()
        self._file.write(record)
        location = RecordLocation(self._path().name, self._offset, len(record))
        self._offset += len(record)
        return location

    def flush(self) -> None:
        """Hand all written bytes to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file. Idempotent."""
        self._file.close()

    def _path(self) -> Path:
        return self.directory / f"{self._number:06d}.seg"

    def _open(self) -> None:
        self._file: BinaryIO = self._path().open("ab")
        self._offset = self._file.tell()


def read(directory: Path, segment: str, offset: int, length: int) -> Rollout:
    """Read the rollout at this location. Raises `HeadraceError` if its bytes are gone or damaged."""
    path = directory / segment
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record = file.read(length)
    except OSError as error:
        raise HeadraceError(f"{path} cannot be read: {error.strerror}") from error
    if len(record) != length or not _sound(record):
        raise HeadraceError(f"{path} is damaged: no sound record in bytes {offset} to {offset + length}")
    return decode(Rollout, _frames(memoryview(record)[_HEADER.size :]))


def _record(rollout: Rollout) -> bytes:
    frames = encode(rollout)
    payload = b"".join([struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames)), *frames])
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload


def _frames(payload: memoryview) -> list[bytes]:
    (count,) = struct.unpack_from("<I", payload)
    lengths = struct.unpack_from(f"<{count}I", payload, 4)
    start, frames = 4 * (count + 1), []
    for length in lengths:
        frames.append(bytes(payload[start : start + length]))
        start += length
    return frames


def _sound(record: bytes) -> bool:
    if len(record) <= _HEADER.size:
        return False
    payload = memoryview(record)[_HEADER.size :]
    return _HEADER.unpack_from(record) == (len(payload), zlib.crc32(payload))


def _cut_torn_tail(path: Path) -> bool:
    """Cut an unfinished record off the end. Return False if a record is damaged although more bytes follow it."""
    size, offset = path.stat().st_size, 0
    with path.open("r+b") as file:
        while offset < size:
            file.seek(offset)
            header = file.read(_HEADER.size)
            length = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else size
            end = offset + _HEADER.size + length
            if end > size or not _sound(header + file.read(length)):
                if end < size and length:
                    return False
                file.truncate(offset)
                break
            offset = end
    return True
