"""A folder of versions behind an fsspec URL: a version appears by a move of what was uploaded whole.

Stores have no locks. A marker names the run that publishes there: another run is refused, and a trainer whose marker
was replaced writes nothing more. No torch here: the controller sweeps. Waits are bounded by the store's own timeouts.
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
"""The most bytes handed to a store at once; it may copy them."""
_WITH_DIRECTORIES = {"file", "local", "memory", "ftp", "sftp", "ssh", "smb", "hdfs", "webhdfs"}
"""Schemes whose folders are made and removed; elsewhere they are part of a name, and making one may make a bucket."""
_FOREIGN_ERRORS = {
    "botocore.exceptions": "BotoCoreError",
    "aiohttp": "ClientError",
    "azure.core.exceptions": "AzureError",
    "google.auth.exceptions": "GoogleAuthError",
    "paramiko": "SSHException",
}
"""Errors of stores' libraries that are not `OSError`s, by module; one that is not loaded raises nothing."""


class Marker(msgspec.Struct, frozen=True):
    """Who publishes in a folder."""

    owner: str
    token: str


def is_url(directory: Path | str) -> bool:
    """Whether this is a place for fsspec rather than a path."""
    return isinstance(directory, str) and "://" in directory


def owner_of(run_dir: Path) -> str:
    """The run of this directory, as other hosts call it."""
    return f"{socket.gethostname()}:{run_dir.absolute()}"


def connect(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path there; raises `ConfigError` where no package for it is installed."""
    import fsspec

    try:
        found, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"[delivery] directory: {url} cannot be used: {_line(error)}") from error
    return found, str(path)


@contextlib.contextmanager
def open_object(url: str) -> Iterator[tuple[BinaryIO, int, str]]:
    """An object, its size, and a stamp that changes when it does."""
    with _as_delivery_errors(f"file {url} cannot be read"):
        store, path = connect(url)
        stamp, size = _stamp(store, path), store.info(path)["size"]
        with store.open(path, "rb", block_size=READ_AHEAD, cache_type="readahead") as file:
            yield file, size, stamp


def stamp_of_object(url: str) -> str:
    """The stamp of an object as it is now; raises `DeliveryError` when it is gone."""
    with _as_delivery_errors(f"file {url} was removed while it was read"):
        return _stamp(*connect(url))


class ObjectFolder:
    """A folder with its writer's marker, from `__init__` to `remove`; see `Storage`."""

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
        """The URL of a version's file."""
        return f"{self._url}/{file_of(version)}"

    def write(self, location: str, layout: FileLayout, chunks: Sequence[memoryview]) -> None:
        """Upload under another name, then move: the version is whole or absent as far as the store moves at once."""
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
        """Remove a version's file; one that is gone is fine."""
        with _as_delivery_errors(f"{location} cannot be removed"):
            self._delete(f"{self._path}/{location.rsplit('/', 1)[1]}")

    def remove(self) -> None:
        """Leave nothing of ours; where another trainer took over, all of it is that one's."""
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
    """Remove what a dead trainer of this run left there; False where there is nothing, or another run's."""
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
    """What a store may raise. Asked for when something was raised: whichever library did it is loaded then."""
    loaded = ((sys.modules[module], name) for module, name in _FOREIGN_ERRORS.items() if module in sys.modules)
    return (OSError, ValueError, RuntimeError, ConfigError, *(getattr(module, name) for module, name in loaded))


def _line(error: BaseException) -> str:
    """The reason in one line."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__
