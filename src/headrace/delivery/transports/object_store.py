"""A folder of versions behind an fsspec URL: a version is uploaded completely and then moved to its name.

Stores have no locks. Instead, a marker file names the run that publishes in a folder: another run is refused, and a
trainer whose marker was replaced writes nothing more. Waits are limited by the store's own timeouts. This module does
not import torch, because the controller sweeps folders.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from headrace.delivery.transports.files import FileLayout, file_of, is_ours
from headrace.errors import ConfigError, DeliveryError

MARKER = "writer.json"
READ_AHEAD = 16 << 20
PIECE = 64 << 20
"""The most bytes passed to a store at once, because the store may copy them."""
_WITH_DIRECTORIES = {"file", "local", "memory", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
"""The schemes whose folders must be made and removed. In other stores a folder is only part of a name, and making a
folder might make a bucket."""
_FOREIGN_ERRORS = {
    "botocore.exceptions": "BotoCoreError",
    "aiohttp": "ClientError",
    "azure.core.exceptions": "AzureError",
    "google.auth.exceptions": "GoogleAuthError",
    "paramiko": "SSHException",
}
"""The error classes of stores' libraries that are not `OSError`s, by module. Only modules that are loaded matter."""


class Marker(msgspec.Struct, frozen=True):
    """The content of the marker file: the run that publishes in a folder, and a random token of its trainer."""

    owner: str
    token: str


def is_url(directory: Path | str) -> bool:
    """Return whether this is a URL for fsspec and not a path."""
    return isinstance(directory, str) and "://" in directory


def owner_of(run_dir: Path) -> str:
    """Return the name of the run in this directory that is unique across hosts."""
    return f"{socket.gethostname()}:{run_dir.absolute()}"


def connect(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; raises `ConfigError` if no package for it is installed."""
    import fsspec

    try:
        found, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"[delivery] directory: {url} cannot be used: {_line(error)}") from error
    return found, str(path)


@contextlib.contextmanager
def open_object(url: str) -> Iterator[tuple[BinaryIO, int, str]]:
    """Open an object; yield it with its size and a stamp that changes when the object changes."""
    with _as_delivery_errors(f"file {url} cannot be read"):
        store, path = connect(url)
        stamp, size = _stamp(store, path), store.info(path)["size"]
        with store.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead") as file:
            yield file, size, stamp


def stamp_of_object(url: str) -> str:
    """Return the current stamp of an object; raises `DeliveryError` if the object is gone."""
    with _as_delivery_errors(f"file {url} was removed while it was read"):
        return _stamp(*connect(url))


class ObjectFolder:
    """A folder of versions. It holds the writer's marker from `__init__` to `remove`; see `Storage`."""

    mounted = False

    def __init__(self, url: str, owner: str) -> None:
        self._url = url.rstrip("/")
        self._store, self._path = connect(self._url)
        self._marker = Marker(owner, secrets.token_hex(8))
        with _as_delivery_errors(f"weights cannot be published in {url}"):
            held = self._held()
            if held is not None and held.owner != owner:
                raise DeliveryError(
                    f"{held.owner} publishes weights in {url}; if that run is dead, remove {self._url}/{MARKER}"
                )
            if self._has_directories():
                self._store.makedirs(self._path, exist_ok=True)
            self._store.pipe_file(f"{self._path}/{MARKER}", msgspec.json.encode(self._marker))
            self._clear()

    def location_of(self, version: int) -> str:
        """Return the URL of a version's file."""
        return f"{self._url}/{file_of(version)}"

    def write(self, location: str, layout: FileLayout, chunks: Sequence[memoryview]) -> None:
        """Upload the file under another name, then move it; the version appears at once if moves are atomic there."""
        path = f"{self._path}/{location.rsplit('/', 1)[1]}"
        partial = f"{path}.partial"
        with _as_delivery_errors(f"{location} cannot be written"), contextlib.ExitStack() as undo:
            self._check_marker()
            undo.callback(self._delete, partial)
            with self._store.open(partial, "wb") as file:
                for chunk in (memoryview(layout.header), *chunks):
                    for start in range(0, len(chunk), PIECE):
                        file.write(chunk[start : start + PIECE])
            self._store.mv(partial, path)
            undo.pop_all()

    def delete(self, location: str) -> None:
        """Remove a version's file; it is no error if the file is gone."""
        with _as_delivery_errors(f"{location} cannot be removed"):
            self._delete(f"{self._path}/{location.rsplit('/', 1)[1]}")

    def remove(self) -> None:
        """Remove all versions and the marker; if another trainer took over the folder, remove nothing."""
        with _as_delivery_errors(f"{self._url} cannot be cleared"):
            if self._held() == self._marker:
                self._clear()
                self._delete(f"{self._path}/{MARKER}")
                if self._has_directories():
                    with contextlib.suppress(OSError):
                        self._store.rmdir(self._path)

    def _held(self) -> Marker | None:
        self._store.invalidate_cache()
        try:
            content = self._store.cat_file(f"{self._path}/{MARKER}")
        except FileNotFoundError:
            return None
        try:
            return msgspec.json.decode(content, type=Marker)
        except msgspec.DecodeError as error:
            raise DeliveryError(f"{self._url}/{MARKER} is not a marker of ours") from error

    def _check_marker(self) -> None:
        if self._held() != self._marker:
            raise DeliveryError(f"another trainer publishes weights in {self._url}")

    def _clear(self) -> None:
        self._store.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            for path in self._store.ls(self._path, detail=False):
                if is_ours(str(path).rsplit("/", 1)[-1]):
                    self._delete(path)

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._store.rm_file(path)

    def _has_directories(self) -> bool:
        return self._url.split("://", 1)[0] in _WITH_DIRECTORIES


def sweep_folder(url: str, owner: str) -> bool:
    """Remove what a dead trainer of this run left in a folder; return False if there is nothing.

    Raises `DeliveryError` if the folder belongs to another run.
    """
    store, path = connect(url)
    with _as_delivery_errors(f"{url} cannot be swept"):
        store.invalidate_cache()
        if not store.exists(f"{path.rstrip('/')}/{MARKER}"):
            return False
    ObjectFolder(url, owner).remove()
    return True


def _stamp(store: Any, path: str) -> str:
    store.invalidate_cache()
    return str(store.ukey(path))


@contextlib.contextmanager
def _as_delivery_errors(what: str) -> Iterator[None]:
    try:
        yield
    except _errors() as error:
        raise DeliveryError(f"{what}: {_line(error)}") from error


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that a store may raise. Called after an error, when the library that raised it is loaded."""
    loaded = ((sys.modules[module], name) for module, name in _FOREIGN_ERRORS.items() if module in sys.modules)
    return (OSError, ValueError, RuntimeError, ConfigError, *(getattr(module, name) for module, name in loaded))


def _line(error: BaseException) -> str:
    """Return the reason of an error in one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__
