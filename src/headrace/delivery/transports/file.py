"""The `file` transport: one safetensors file per version, in a directory that trainer and engines can reach.

The trainer waits only for a copy in memory; the publisher's thread writes the file. The newest `keep` files are kept,
and so is every file whose version is not acknowledged. A location is a path, or a URL that fsspec can reach.
"""

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import PackingPlan, pack, packed_bytes, unpack
from headrace.delivery.transports.base import (
    PlacedSender,
    ReadSpan,
    Sender,
    SenderSettings,
    Source,
    SourceSettings,
)
from headrace.delivery.transports.storage import opened, stamp_of, storage_at
from headrace.errors import DeliveryError

_PIECE = 64 << 20
"""The most bytes read at once, because the file object of a store makes a copy of them."""
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


class FileSender(PlacedSender):
    """The trainer's end, which owns the versions in the directory."""

    name = "file"

    def __init__(self, directory: Path | str, *, keep: int = 2, owner: str = "") -> None:
        """Create a sender; `owner` names the run for storage that has no locks."""
        super().__init__("file")
        self._storage = storage_at(directory, owner)
        self._keep = keep
        self._lock = threading.Lock()
        self._unwritten: dict[str, tuple[int, PackingPlan, torch.Tensor]] = {}
        self._uploaded: dict[str, torch.Tensor] = {}
        self._files: dict[str, int] = {}
        self._spare: list[torch.Tensor] = []

    def finish(self, location: str) -> None:
        """Write the file to the disk or the store, and remove files that are too old."""
        with self._lock:
            if location not in self._unwritten:
                raise DeliveryError(f"{location}: nothing to write, or the transport is closed")
            version, plan, packed = self._unwritten.pop(location)
        layout = layout_of(version, plan.entries)
        offsets = {entry.name: entry.offset for entry in plan.entries}
        memory = packed.numpy().data
        chunks = [memory[offsets[entry.name] :][: entry.nbytes] for entry in layout.entries]
        self._storage.write(location, [memoryview(layout.header), *chunks])
        with self._lock:
            self._files[location] = version
            if self._storage.mounted:
                self._spare.append(packed)
            else:
                self._uploaded[location] = packed
        self._prune()

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of the mapped file; for a store, views of the bytes that were uploaded.

        The digest is then that of the uploaded bytes, so an engine notices if the store changed them.
        """
        with self._lock:
            version = self._files.get(location)
            uploaded = self._uploaded.get(location)
        if version is None:
            raise DeliveryError(f"file {location} holds nothing")
        if uploaded is not None:
            return unpack(uploaded, plan.entries)
        layout = layout_of(version, plan.entries)
        with Path(location).open("rb") as file:
            check_header(file, location, os.fstat(file.fileno()).st_size, version, layout)
            # Copy-on-write instead of read-only, because torch warns about read-only buffers; this is as safe.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return unpack(torch.frombuffer(mapped, dtype=torch.uint8), layout.entries)

    def release(self, location: str) -> None:
        """Allow the file to be removed once there are `keep` newer ones.

        From a store it is removed with the next version, by the publisher's thread, so that training does not wait.
        """
        with self._lock:
            self._unwritten.pop(location, None)
            if (packed := self._uploaded.pop(location, None)) is not None:
                self._spare.append(packed)
        super().release(location)
        if self._storage.mounted:
            self._prune()

    def close(self) -> None:
        """Remove every version and the lock."""
        if self._ended:
            return
        super().close()
        with self._lock:
            self._unwritten.clear()
            self._uploaded.clear()
            self._files.clear()
            self._spare.clear()
            self._storage.remove()

    def _prune(self) -> None:
        with self._lock:
            old = sorted(self._files, key=self._files.__getitem__, reverse=True)[self._keep :]
            doomed = {location: self._files.pop(location) for location in old if not self._holds(location)}
        # Outside the lock, because a store may be slow and the trainer's copy needs the lock.
        for location, version in doomed.items():
            try:
                self._storage.delete(location)
            except DeliveryError:
                # A file that stays too long does no harm. Removal is tried again with the next version and at the end.
                with self._lock:
                    self._files[location] = version

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
        return self._storage.location_of(version)

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            self._spare = [spare for spare in self._spare if len(spare) == plan.nbytes]
            packed = self._spare.pop() if self._spare else torch.empty(plan.nbytes, dtype=torch.uint8)
        pack(packed, plan.entries, weights)
        with self._lock:
            self._unwritten[location] = (version, plan, packed)


class FileSource:
    """An engine's end, which reads a file into its own memory, so later changes to the file do not matter."""

    private = True

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._opened: tuple[str, int, object] | None = None

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Read the file; see `Source.open`."""
        self._opened = None
        with opened(location) as (file, size, stamp):
            layout = layout_of(version, entries)
            check_header(file, location, size, version, layout)
            nbytes = packed_bytes(entries)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
            memory = self._buffer.numpy().data
            offsets = {entry.name: entry.offset for entry in entries}
            for entry in layout.entries:
                _read_all(file, memory[offsets[entry.name] :][: entry.nbytes], location)
        self._opened = (location, version, stamp)
        return unpack(self._buffer, entries)

    @contextmanager
    def spans(self, location: str, version: int, entries: Sequence[Entry]) -> Iterator[ReadSpan]:
        """Read the file span by span; see `Spanning.spans`."""
        self._opened = None
        with opened(location) as (file, size, stamp):
            layout = layout_of(version, entries)
            check_header(file, location, size, version, layout)
            places = {entry.name: entry.offset for entry in layout.entries}
            offsets = [entry.offset for entry in entries]

            def read(start: int, into: memoryview) -> None:
                stop = start + len(into)
                for entry in entries[max(0, bisect_right(offsets, start) - 1) : bisect_right(offsets, stop)]:
                    low, high = max(entry.offset, start), min(entry.offset + entry.nbytes, stop)
                    if low < high:
                        file.seek(places[entry.name] + low - entry.offset)
                        _read_all(file, into[low - start : high - start], location)

            self._opened = (location, version, stamp)
            yield read

    def verify(self, location: str, version: int) -> None:
        """Check that the file is still the file that was read."""
        if self._opened is None or self._opened[:2] != (location, version):
            raise DeliveryError(f"file {location} was not opened for version {version}")
        if stamp_of(location) != self._opened[2]:
            raise DeliveryError(f"file {location} was changed while it was read")

    def close(self) -> None:
        """Release the memory."""
        self._buffer = self._opened = None


def _read_all(file: BinaryIO, target: memoryview, location: str) -> None:
    while len(target):
        count = file.readinto(target[:_PIECE])  # type: ignore[attr-defined]
        if not count:
            raise DeliveryError(f"file {location} ended while it was read")
        target = target[count:]


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


def check_header(file: BinaryIO, location: str, size: int, version: int, expected: FileLayout) -> None:
    """Raise `DeliveryError` unless the file has the header and the size of this version and layout."""
    name = location.rsplit("/", 1)[-1]
    start = file.read(len(expected.header))
    if start != expected.header:
        raise DeliveryError(f"file {name} {_difference(file, start, version)}")
    if size != expected.nbytes:
        raise DeliveryError(f"file {name} has {size} bytes, not {expected.nbytes}")


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


def _dtype(entry: Entry) -> tuple[str, int]:
    """Return the safetensors name of the entry's dtype, and its bytes per element."""
    if entry.dtype not in _DTYPES:
        raise DeliveryError(f"{entry.name} is of dtype {entry.dtype}, which safetensors does not have")
    return _DTYPES[entry.dtype]


class Transport:
    """The `file` transport: files in a directory or an object store."""

    uses_directory = True

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        if settings.directory is None:
            raise DeliveryError("the file transport needs a directory")
        return FileSender(settings.directory, keep=settings.keep, owner=settings.owner or settings.run_id)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return FileSource()
