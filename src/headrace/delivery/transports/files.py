"""The directory of the `file` transport: one safetensors file per version, complete or absent, and one writer.

A file appears by an atomic rename after its bytes are on the disk, and is never written to again. The writer holds a
lock; the process that gets the lock may remove everything that a previous writer left. This module does not import
torch, because the controller sweeps directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.delivery.base import Entry
from headrace.errors import DeliveryError

LOCK = "writer.lock"
_OURS = re.compile(r"version-\d+\.safetensors(\.partial)?")
_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_ALIGNMENT = 8
_LONGEST_HEADER = 100 << 20
"""The limit of the safetensors format."""


class FileLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a version's file. Tensors with the widest elements come first, so that every tensor is aligned."""

    header: bytes
    entries: tuple[Entry, ...]
    """The tensors in the order of the file, with offsets from its beginning."""
    nbytes: int


def layout_of(version: int, entries: Iterable[Entry]) -> FileLayout:
    """Return the layout of this version's file; a pure function of version and entries."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "headrace_version": str(version)}}
    end = 0
    ordered = sorted(entries, key=lambda entry: (-_dtype(entry)[1], entry.name))
    for entry in ordered:
        place = [end, end + entry.nbytes]
        header[entry.name] = {"dtype": _dtype(entry)[0], "shape": entry.shape, "data_offsets": place}
        end += entry.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    start = 8 + len(text)
    placed = []
    for entry in ordered:
        placed.append(msgspec.structs.replace(entry, offset=start))
        start += entry.nbytes
    return FileLayout(header=(start - end - 8).to_bytes(8, "little") + text, entries=tuple(placed), nbytes=start)


def file_of(version: int) -> str:
    """Return the name of a version's file."""
    return f"version-{version:08d}.safetensors"


def is_ours(name: str) -> bool:
    """Return whether a file of this name holds a version, complete or partial."""
    return _OURS.fullmatch(name) is not None


def check_header(file: BinaryIO, location: str, size: int, version: int, expected: FileLayout) -> None:
    """Raise `DeliveryError` unless the file has the header and the size of this version and layout."""
    name = location.rsplit("/", 1)[-1]
    start = file.read(len(expected.header))
    if start != expected.header:
        raise DeliveryError(f"file {name} {_difference(file, start, version)}")
    if size != expected.nbytes:
        raise DeliveryError(f"file {name} is truncated: {size} of {expected.nbytes} bytes")


def _difference(file: BinaryIO, start: bytes, version: int) -> str:
    """Say what is wrong with a header that is not the expected one."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > _LONGEST_HEADER:
        return "is not a safetensors file"
    file.seek(8)
    text = file.read(length)
    if len(text) < length:
        return "is truncated in its header"
    try:
        metadata = msgspec.json.decode(text, type=dict[str, Any]).get("__metadata__")
    except msgspec.DecodeError:
        return "has a damaged header"
    held = metadata.get("headrace_version") if isinstance(metadata, dict) else None
    if held != str(version):
        return f"holds version {held}, not {version}" if held else "was not published by a run"
    return f"holds version {version} in another layout"


class Directory:
    """A directory of versions. It holds the writer's lock from `__init__` to `remove`; see `Storage`."""

    mounted = True

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DeliveryError(f"weights cannot be published in {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise DeliveryError(f"another trainer publishes weights in {path}") from error
        self.clear()

    def location_of(self, version: int) -> str:
        """Return the path of a version's file."""
        return str(self.path / file_of(version))

    def write(self, location: str, layout: FileLayout, chunks: Iterable[memoryview]) -> None:
        """Write the header and these chunks to the disk; the complete file then appears under its name at once."""
        path = Path(location)
        partial = path.with_name(path.name + ".partial")
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(partial.unlink, missing_ok=True)
                with partial.open("wb", buffering=0) as file:
                    for chunk in itertools.chain([memoryview(layout.header)], chunks):
                        _write_all(file.fileno(), chunk)
                    os.fsync(file.fileno())
                partial.rename(path)
                undo.pop_all()
            _sync_directory(self.path)
        except OSError as error:
            raise DeliveryError(f"{path} cannot be written: {error.strerror}") from error

    def delete(self, location: str) -> None:
        """Remove a version's file; it is no error if the file is gone."""
        try:
            Path(location).unlink(missing_ok=True)
        except OSError as error:
            raise DeliveryError(f"{location} cannot be removed: {error.strerror}") from error

    def clear(self) -> None:
        """Remove every version, complete or partial, and nothing else."""
        for path in self.path.iterdir():
            if is_ours(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all versions and the lock; the directory itself stays if it contains anything else."""
        self.clear()
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):
            self.path.rmdir()


def sweep_directory(path: Path) -> bool:
    """Remove what a dead writer left in a directory; return False if there is nothing or the writer is alive."""
    if not (path / LOCK).exists():
        return False
    try:
        Directory(path).remove()
    except DeliveryError:
        return False
    return True


def _dtype(entry: Entry) -> tuple[str, int]:
    """Return the safetensors name of the entry's dtype, and its bytes per element."""
    if entry.dtype not in _DTYPES:
        raise DeliveryError(f"{entry.name} is of dtype {entry.dtype}, which safetensors does not have")
    return _DTYPES[entry.dtype]


def _write_all(fd: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(fd, chunk) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
