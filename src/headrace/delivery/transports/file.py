"""Weights through a directory: one safetensors file per version, which any reader of the directory can take.

The trainer copies to memory and goes on; the file is written by the publisher's thread. The newest `keep` files stay,
and so does every one that is not acknowledged. Locations are paths; URLs of other file systems are not taken yet.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import Plan, pack, unpack
from headrace.delivery.transports.files import Directory, check_header, layout_of
from headrace.delivery.transports.places import Places
from headrace.errors import DeliveryError


class FileSender:
    """The trainer's end: owns the directory's versions."""

    name = "file"

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self._directory = Directory(directory.absolute())
        self._keep = keep
        self._places = Places("file")
        self._lock = threading.Lock()
        self._unwritten: dict[str, tuple[int, Plan, torch.Tensor]] = {}
        self._files: dict[str, int] = {}
        self._spare: list[torch.Tensor] = []
        self._closed = False

    def wait(self, version: int, timeout: float) -> None:
        """Wait until fewer than two versions are unacknowledged; see `Sender.wait`."""
        self._places.wait(version, timeout)

    def write(self, version: int, plan: Plan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights to memory; see `Sender.write`."""
        location = self._places.take(version, lambda held: str(self._directory.path_of(version)))
        copied = False
        try:
            packed = self._buffer(plan.nbytes)
            pack(packed, plan.entries, weights)
            copied = True
        finally:
            if not copied:
                self._places.release(location)
        with self._lock:
            self._unwritten[location] = (version, plan, packed)
        return location

    def finish(self, location: str) -> None:
        """Write the file, to the disk; remove those that are too old."""
        with self._lock:
            if self._closed or location not in self._unwritten:
                raise DeliveryError(f"{location}: nothing to write, or the transport is closed")
            version, plan, packed = self._unwritten.pop(location)
        layout = layout_of(version, plan.entries)
        offsets = {entry.name: entry.offset for entry in plan.entries}
        memory = packed.numpy().data
        chunks = [memory[offsets[entry.name] :][: entry.nbytes] for entry in layout.entries]
        self._directory.write(Path(location), layout, chunks)
        with self._lock:
            self._files[location] = version
            self._spare.append(packed)
        self._prune()

    def snapshot(self, location: str, plan: Plan) -> dict[str, torch.Tensor]:
        """The file, mapped."""
        with self._lock:
            version = self._files.get(location)
        if version is None or not self._places.holds(location):
            raise DeliveryError(f"file {location} holds nothing")
        layout = layout_of(version, plan.entries)
        with Path(location).open("rb") as file:
            check_header(file, version, layout)
            # Copy-on-write, not read-only: torch takes no read-only buffer without a warning, and this is as safe.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return unpack(torch.frombuffer(mapped, dtype=torch.uint8), layout.entries)

    def release(self, location: str) -> None:
        """The file goes once `keep` newer ones are there."""
        with self._lock:
            self._unwritten.pop(location, None)
        self._places.release(location)
        self._prune()

    def close(self) -> None:
        """Remove every version and the lock."""
        self._places.close()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._unwritten.clear()
            self._spare.clear()
            self._directory.remove()

    def _prune(self) -> None:
        with self._lock:
            if self._closed:
                return
            newest_first = sorted(self._files, key=self._files.__getitem__, reverse=True)
            for location in newest_first[self._keep :]:
                if not self._places.holds(location):
                    del self._files[location]
                    Path(location).unlink(missing_ok=True)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            while self._spare:
                if len(buffer := self._spare.pop()) == nbytes:
                    return buffer
        return torch.empty(nbytes, dtype=torch.uint8)


class FileSource:
    """An engine's end: reads a file into memory of its own, so nothing that happens to the file later reaches it."""

    private = True

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._opened: tuple[str, int, os.stat_result] | None = None

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Read the file; see `Source.open`."""
        self._opened = None
        try:
            with Path(location).open("rb", buffering=0) as file:
                return self._read(file, location, version, entries)
        except OSError as error:
            raise DeliveryError(f"file {location} cannot be read: {error.strerror}") from error

    def verify(self, location: str, version: int) -> None:
        """Check that the file is the one that was read."""
        if self._opened is None or self._opened[:2] != (location, version):
            raise DeliveryError(f"file {location} was not opened for version {version}")
        try:
            now = Path(location).stat()
        except OSError as error:
            raise DeliveryError(f"file {location} was removed while it was read: {error.strerror}") from error
        if _identity(now) != _identity(self._opened[2]):
            raise DeliveryError(f"file {location} was changed while it was read")

    def close(self) -> None:
        """Let go of the memory."""
        self._buffer = self._opened = None

    def _read(self, file: BinaryIO, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        status = os.fstat(file.fileno())
        layout = layout_of(version, entries)
        check_header(file, version, layout)
        nbytes = max(entry.offset + entry.nbytes for entry in entries)
        if self._buffer is None or len(self._buffer) < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        memory = self._buffer.numpy().data
        offsets = {entry.name: entry.offset for entry in entries}
        for entry in layout.entries:
            _read_all(file, memory[offsets[entry.name] :][: entry.nbytes], location)
        self._opened = (location, version, status)
        return unpack(self._buffer, entries)


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_all(file: BinaryIO, target: memoryview, location: str) -> None:
    while len(target):
        count = file.readinto(target)  # type: ignore[attr-defined]
        if not count:
            raise DeliveryError(f"file {location} ended while it was read")
        target = target[count:]
