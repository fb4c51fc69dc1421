"""Segments hold rollouts on disk: append-only files of checksummed records. Flushed bytes never change again.

Every process writes files of its own, so the end of an older file, which a crash may have torn, stays as it is. A file
that was found damaged is renamed `damaged-NNNNNN.seg`. Its intact records are still read under the old name.

    segments/000001.seg:  record record record ...
    record:   u32 payload bytes | u32 crc32 of the payload | payload
    payload:  u32 frames | u32 bytes of each frame | frames of `channel.codec.encode(rollout)`

All numbers are little-endian.
"""

import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.channel.codec import decode, encode
from headrace.config.file_digests import sync
from headrace.errors import DataError
from headrace.types import Rollout

DAMAGED = "damaged-"
"""The beginning of the name of a file that was found damaged and set aside."""
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
        names = (path.stem.removeprefix(DAMAGED) for path in directory.glob("*.seg"))
        self._number = max((int(name) for name in names if name.isdecimal()), default=0)
        self._name = ""
        self._file: BinaryIO | None = None
        """The file that is being written; None until the first record of this process."""
        self._offset = 0
        self._unsynced = False

    def append(self, rollout: Rollout) -> RecordLocation:
        """Write a rollout. It survives a crash of this process after `flush`, and a power failure after `sync`."""
        record = _record(rollout)
        if self._file is None or (self._offset and self._offset + len(record) > self._roll_bytes):
            self.close()
            self._number += 1
            self._name = f"{self._number:06d}.seg"
            self._file, self._offset = (self.directory / self._name).open("xb"), 0
            sync(self.directory)
        self._file.write(record)
        self._unsynced = True
        location = RecordLocation(self._name, self._offset, len(record))
        self._offset += len(record)
        return location

    def flush(self) -> None:
        """Hand all written bytes to the operating system."""
        if self._file is not None:
            self._file.flush()

    def sync(self) -> None:
        """Wait until all written bytes are on the disk."""
        self.flush()
        if self._file is not None and self._unsynced:
            os.fsync(self._file.fileno())
            self._unsynced = False

    def close(self) -> None:
        """Sync and close the file. Idempotent."""
        self.sync()
        if self._file is not None:
            self._file.close()
            self._file = None


def segment_path(directory: Path, segment: str) -> Path:
    """Return where a segment is: under its own name, or under the name of a damaged one that was set aside."""
    own, aside = directory / segment, directory / f"{DAMAGED}{segment}"
    return aside if aside.exists() and not own.exists() else own


def read(directory: Path, segment: str, offset: int, length: int) -> Rollout:
    """Read the rollout at this location. Raises `DataError` if its bytes are gone or damaged."""
    path = segment_path(directory, segment)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            record = file.read(length)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if len(record) != length or not _sound(record):
        raise DataError(f"{path} is damaged: no sound record in bytes {offset} to {offset + length}")
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
