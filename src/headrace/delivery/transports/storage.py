"""The storage of the `file` transport: a directory of a mounted file system, or a folder behind an fsspec URL.

In both, a version's file is complete or absent, is never written to again, and is written by one trainer. In a
directory, a file appears by an atomic rename after its bytes are on the disk, and the writer holds a lock; the process
that gets the lock may remove everything that a previous writer left. Stores have no locks. There a version is uploaded
completely and then moved to its name, and a marker file names the run that publishes in a folder: another run is
refused, and a trainer whose marker was replaced writes nothing more. Waits are limited by the store's own timeouts.
This module does not import torch, because the controller sweeps storage.
"""

import contextlib
import fcntl
import os
import re
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.config.stores import connect, has_directories, is_url, store_errors
from headrace.errors import ConfigError, DeliveryError

SETTING = "[delivery] directory"
LOCK = "writer.lock"
MARKER = "writer.json"
READ_AHEAD = 16 << 20
PIECE = 64 << 20
"""The most bytes passed to a store at once, because the store may copy them."""
_OURS = re.compile(r"version-\d+\.safetensors(\.partial)?")


class Storage(ABC):
    """The writer's end, valid from its creation to `remove`. All methods raise `DeliveryError` on failure."""

    mounted: bool
    """Whether locations are paths of files that can be mapped into memory."""

    def __init__(self, root: str) -> None:
        self._root = root

    def location_of(self, version: int) -> str:
        """Return the location where readers find a version."""
        return f"{self._root}/version-{version:08d}.safetensors"

    @abstractmethod
    def write(self, location: str, chunks: Iterable[memoryview]) -> None:
        """Write a file of these chunks; the complete file then appears under its name at once."""

    @abstractmethod
    def delete(self, location: str) -> None:
        """Remove a version; it is no error if the version is gone."""

    @abstractmethod
    def remove(self) -> None:
        """Remove everything that this writer created."""


def storage_at(directory: Path | str, owner: str) -> Storage:
    """Open the storage at this path or URL. A store has no locks, so a marker in it names its `owner`, the run."""
    if is_url(directory):
        return _ObjectFolder(str(directory), owner)
    return Directory(Path(directory).absolute())


def sweep_storage(directory: Path | str, owner: str) -> bool:
    """Remove what a dead trainer of this run left.

    Returns False if there is nothing, if another run writes there, or if the storage cannot be reached. In a directory,
    a lock also tells whether the writer is alive. In a store nothing does: the caller must hold the run, so that it has
    no other trainer.
    """
    try:
        if is_url(directory):
            store, path = connect(str(directory), SETTING)
            with store_errors(DeliveryError, f"{directory} cannot be swept"):
                store.invalidate_cache()
                left = bool(store.exists(f"{path.rstrip('/')}/{MARKER}"))
        else:
            left = (Path(directory) / LOCK).exists()
        if left:
            storage_at(directory, owner).remove()
        return left
    except (DeliveryError, ConfigError):
        return False


@contextlib.contextmanager
def opened(location: str) -> Iterator[tuple[BinaryIO, int, object]]:
    """Open a published file; yield it, its size and a stamp identifying it. Errors are raised as `DeliveryError`."""
    if is_url(location):
        with store_errors(DeliveryError, f"file {location} cannot be read"):
            store, path = connect(location, SETTING)
            stamp, size = _stamp(store, path), store.info(path)["size"]
            with store.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead") as file:
                yield file, size, stamp
        return
    try:
        with Path(location).open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            yield file, status.st_size, _identity(status)
    except OSError as error:
        raise DeliveryError(f"file {location} cannot be read: {error.strerror}") from error


def stamp_of(location: str) -> object:
    """Return the stamp of the file that is there now; raises `DeliveryError` if there is none."""
    if is_url(location):
        with store_errors(DeliveryError, f"file {location} was removed while it was read"):
            return _stamp(*connect(location, SETTING))
    try:
        return _identity(Path(location).stat())
    except OSError as error:
        raise DeliveryError(f"file {location} was removed while it was read: {error.strerror}") from error


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def owner_of(run_dir: Path) -> str:
    """Return the name of the run in this directory that is unique across hosts."""
    return f"{socket.gethostname()}:{run_dir.absolute()}"


class Directory(Storage):
    """A directory of versions. It holds the writer's lock from `__init__` to `remove`; see `Storage`."""

    mounted = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
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
        self._clear()

    def write(self, location: str, chunks: Iterable[memoryview]) -> None:
        """Write the file to the disk under another name, then rename it."""
        path = Path(location)
        partial = path.with_name(path.name + ".partial")
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(partial.unlink, missing_ok=True)
                with partial.open("wb", buffering=0) as file:
                    for chunk in chunks:
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

    def _clear(self) -> None:
        """Remove every version, complete or partial, and nothing else."""
        for path in self.path.iterdir():
            if _OURS.fullmatch(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all versions and the lock; the directory itself stays if it contains anything else."""
        self._clear()
        (self.path / LOCK).unlink(missing_ok=True)
        os.close(self._lock)
        with contextlib.suppress(OSError):
            self.path.rmdir()


class _Marker(msgspec.Struct, frozen=True):
    """The content of the marker file: the run that publishes in a folder, and a random token of its trainer."""

    owner: str
    token: str


class _ObjectFolder(Storage):
    """A folder of versions. It holds the writer's marker from `__init__` to `remove`; see `Storage`."""

    mounted = False

    def __init__(self, url: str, owner: str) -> None:
        super().__init__(url.rstrip("/"))
        self._store, self._path = connect(self._root, SETTING)
        self._marker = _Marker(owner, secrets.token_hex(8))
        with store_errors(DeliveryError, f"weights cannot be published in {url}"):
            held = self._held()
            if held is not None and held.owner != owner:
                raise DeliveryError(
                    f"{held.owner} publishes weights in {url}; if that run is dead, remove {self._root}/{MARKER}"
                )
            if has_directories(self._root):
                self._store.makedirs(self._path, exist_ok=True)
            self._store.pipe_file(f"{self._path}/{MARKER}", msgspec.json.encode(self._marker))
            self._clear()

    def write(self, location: str, chunks: Iterable[memoryview]) -> None:
        """Upload the file under another name, then move it; the version appears at once if moves are atomic there."""
        path = self._in_store(location)
        partial = f"{path}.partial"
        with store_errors(DeliveryError, f"{location} cannot be written"), contextlib.ExitStack() as undo:
            if self._held() != self._marker:
                raise DeliveryError(f"another trainer publishes weights in {self._root}")
            undo.callback(self._delete, partial)
            with self._store.open(partial, "wb") as file:
                for chunk in chunks:
                    for start in range(0, len(chunk), PIECE):
                        file.write(chunk[start : start + PIECE])
            self._store.mv(partial, path)
            undo.pop_all()

    def delete(self, location: str) -> None:
        with store_errors(DeliveryError, f"{location} cannot be removed"):
            self._delete(self._in_store(location))

    def remove(self) -> None:
        """Remove all versions and the marker; if another trainer took over the folder, remove nothing."""
        with store_errors(DeliveryError, f"{self._root} cannot be cleared"):
            if self._held() == self._marker:
                self._clear()
                self._delete(f"{self._path}/{MARKER}")
                if has_directories(self._root):
                    with contextlib.suppress(OSError):
                        self._store.rmdir(self._path)

    def _in_store(self, location: str) -> str:
        return f"{self._path}/{location.rsplit('/', 1)[1]}"

    def _held(self) -> _Marker | None:
        self._store.invalidate_cache()
        try:
            content = self._store.cat_file(f"{self._path}/{MARKER}")
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(content, type=_Marker)
        except msgspec.DecodeError as error:
            raise DeliveryError(f"{self._root}/{MARKER} is not a marker of ours") from error

    def _clear(self) -> None:
        self._store.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            for path in self._store.ls(self._path, detail=False):
                if _OURS.fullmatch(str(path).rsplit("/", 1)[-1]):
                    self._delete(path)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(path)


def _write_all(fd: int, chunk: memoryview) -> None:
    while len(chunk):
        chunk = chunk[os.write(fd, chunk) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _stamp(store: Any, path: str) -> str:
    store.invalidate_cache()
    return str(store.ukey(path))
