"""A segment is a file in shared memory. Its header says which version it holds; its name says which process owns it.

The counters `begun` and `finished` in the header are equal only while the segment holds one complete version. A reader
checks the header before and after its copy; if the counters differ or the version is another, the copy is torn. A
segment whose owner is dead is removed by the next `sweep`. This module does not import torch, because the controller
sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import re
import struct
import tempfile
from pathlib import Path
from typing import Generic, TypeVar

from headrace.errors import DeliveryError

HEADER_BYTES = 64
_HEADER = struct.Struct("<8sQqQQ")
_MAGIC = b"headrace"
_NAME = re.compile(r"headrace-.+-\d+-\d+")
_SHARED_MEMORY = Path("/dev/shm")

_numbers = itertools.count(1)

logger = logging.getLogger(__name__)


def segment_directories() -> list[Path]:
    """Return the directories in which segments may be, the preferred one first."""
    temporary = Path(tempfile.gettempdir())
    return [_SHARED_MEMORY, temporary] if _SHARED_MEMORY.is_dir() else [temporary]


class SharedSegment:
    """A segment that this process owns. Per version: `begin`, write behind the header, `finish`. Finally: `remove`."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self._sequence = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # The lock lasts as long as this process, and is all that `sweep` asks for: a pid may belong to a process
            # that is dead and not yet waited for, to a later process, or to one of another container.
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            if os.fstat(self._fd).st_nlink == 0:
                raise FileExistsError(f"{path} was swept before it was locked")
            _reserve(self._fd, HEADER_BYTES + nbytes)
            self.buffer = mmap.mmap(self._fd, HEADER_BYTES + nbytes)
        except OSError:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def create(cls, run_id: str, nbytes: int) -> SharedSegment:
        """Create a segment of this process in the first directory that has room for it."""
        reasons = []
        marked = re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:64] or "run"
        for directory in segment_directories():
            try:
                segment = None
                while segment is None:
                    # A name that exists was left by a dead process with the same pid; a sweep will remove it. A sweep
                    # may also have removed the new file before it was locked.
                    with contextlib.suppress(FileExistsError):
                        segment = cls(directory / f"headrace-{marked}-{os.getpid()}-{next(_numbers)}", nbytes)
            except OSError as error:
                reasons.append(f"{directory}: {error.strerror}")
                continue
            if reasons:
                logger.warning("weights are published in %s, which may be a disk (%s)", directory, reasons[0])
            return segment
        raise DeliveryError(f"no room to publish {nbytes / 2**20:.0f} MiB of weights ({'; '.join(reasons)})")

    def begin(self, version: int) -> None:
        """Mark the segment as incomplete, before this version is written."""
        self._sequence += 1
        _HEADER.pack_into(self.buffer, 0, _MAGIC, self.nbytes, version, self._sequence, self._sequence - 1)

    def finish(self, version: int) -> None:
        """Mark that the segment holds this version, complete."""
        _HEADER.pack_into(self.buffer, 0, _MAGIC, self.nbytes, version, self._sequence, self._sequence)

    def leave(self) -> None:
        """Unmap the segment and give up its lock. The file stays, and belongs to those who `hold` it."""
        os.close(self._fd)
        _unmap(self.buffer)

    def remove(self) -> None:
        """Unlink the segment; its memory is freed with the last view of it."""
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        _unmap(self.buffer)


class MappedSegment:
    """A segment of another process, mapped copy-on-write, so that this process cannot change it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DeliveryError(f"segment {path.name} cannot be opened: {error.strerror}") from error
        try:
            # Copy-on-write instead of read-only, because torch warns about read-only buffers; this is as safe.
            self.buffer = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise DeliveryError(f"segment {path.name} cannot be mapped: {error}") from error

    @property
    def removed(self) -> bool:
        """Whether its owner or a sweep has removed the segment."""
        return os.fstat(self._fd).st_nlink == 0

    @property
    def abandoned(self) -> bool:
        """Whether its owner is dead, which shows because nobody holds the lock."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def hold(self) -> None:
        """Keep the segment from being swept while this process lives; any number of processes may hold it.

        Raises `DeliveryError` if its owner has it.
        """
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            raise DeliveryError(f"segment {self.path.name} cannot be held: {error.strerror}") from error

    def check(self, version: int, nbytes: int = 0) -> None:
        """Raise `DeliveryError` unless the segment exists, is large enough, and holds this version, complete."""
        status = os.fstat(self._fd)
        header = os.pread(self._fd, _HEADER.size, 0)
        if self.removed:
            raise DeliveryError(f"segment {self.path.name} was removed")
        if len(header) < _HEADER.size or header[:8] != _MAGIC:
            raise DeliveryError(f"{self.path.name} is not a segment")
        _, payload, held, begun, finished = _HEADER.unpack(header)
        needed = HEADER_BYTES + max(nbytes, payload)
        if min(status.st_size, len(self.buffer)) < needed:
            raise DeliveryError(f"segment {self.path.name} is truncated: {status.st_size} of {needed} bytes")
        if held != version:
            raise DeliveryError(f"segment {self.path.name} holds version {held}, not {version}: it was used again")
        if begun != finished:
            raise DeliveryError(f"segment {self.path.name} is torn: version {version} was not written to its end")

    def close(self) -> None:
        """Unmap the segment."""
        os.close(self._fd)
        _unmap(self.buffer)


Mapped = TypeVar("Mapped", bound=MappedSegment)


class SegmentSource(Generic[Mapped]):
    """What an engine reads segments with: it maps each segment once, and checks it before and after it is read."""

    private = False

    def __init__(self, kind: type[Mapped]) -> None:
        """Create a source; `kind` is the class of its mapped segments."""
        self._kind = kind
        self._mapped: dict[str, Mapped] = {}

    def verify(self, location: str, version: int) -> None:
        """Check the segment's header again; work that was enqueued since `open` must have finished."""
        if location not in self._mapped:
            raise DeliveryError(f"version {version} was not opened at {location}")
        self._mapped[location].check(version)

    def close(self) -> None:
        """Unmap everything."""
        self._drop(list(self._mapped))

    def _opened(self, location: str, version: int, nbytes: int) -> Mapped:
        """Return a segment that holds this version, complete, and at least this many bytes."""
        if location not in self._mapped:
            self._drop([old for old, segment in self._mapped.items() if segment.removed])
            self._map(location)
        segment = self._mapped[location]
        try:
            segment.check(version, nbytes)
        except DeliveryError:
            self._drop([location])
            raise
        return segment

    def _map(self, location: str) -> Mapped:
        self._mapped[location] = self._kind(Path(location))
        return self._mapped[location]

    def _drop(self, locations: list[str]) -> None:
        for location in locations:
            self._mapped.pop(location).close()


def sweep() -> list[str]:
    """Remove this user's segments whose owner is dead, and return their names. Called at the start of every run."""
    swept = []
    for directory in segment_directories():
        for path in directory.glob("headrace-*"):
            if _NAME.fullmatch(path.name) and _remove_abandoned(path):
                swept.append(path.name)
    return swept


def _remove_abandoned(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # removed meanwhile, or owned by another user
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # the owner is alive
        return False
    finally:
        os.close(fd)
    return True


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve the memory now, because a later write to a full file system would kill the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def _unmap(buffer: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # a view is still in use; the mapping ends with the last view
        buffer.close()
