"""Where versions lie: a directory of a mounted file system, or a folder of whatever fsspec reaches, chosen by its name.

Whichever it is, a version's file is whole or absent, never written to again, and written by one trainer. No torch here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from headrace.delivery.transports.files import Directory, FileLayout, sweep_directory
from headrace.delivery.transports.object_store import ObjectFolder, is_url, open_object, stamp_of_object, sweep_folder
from headrace.errors import ConfigError, DeliveryError


class Storage(Protocol):
    """The writer's end, from when it is made to `remove`. All methods raise `DeliveryError` for what goes wrong."""

    mounted: bool
    """Whether locations are paths that can be mapped."""

    def location_of(self, version: int) -> str:
        """Where readers find a version."""
        ...

    def write(self, location: str, layout: FileLayout, chunks: Sequence[memoryview]) -> None:
        """Make a file of the layout's header and these chunks, at once under its name."""
        ...

    def delete(self, location: str) -> None:
        """Remove a version; one that is gone is fine."""
        ...

    def remove(self) -> None:
        """Leave nothing of ours."""
        ...


def storage_at(directory: Path | str, owner: str) -> Storage:
    """The storage of this path or URL; `owner` is the run, which stores without locks write down."""
    if is_url(directory):
        return ObjectFolder(str(directory), owner)
    return Directory(Path(directory).absolute())


def sweep_storage(directory: Path | str, owner: str) -> bool:
    """Remove what a dead trainer of this run left; False where there is nothing, it lives, or it cannot be reached."""
    if not is_url(directory):
        return sweep_directory(Path(directory))
    try:
        return sweep_folder(str(directory), owner)
    except (DeliveryError, ConfigError):
        return False


@contextlib.contextmanager
def opened(location: str) -> Iterator[tuple[BinaryIO, int, object]]:
    """A file that was published, its size, and a stamp of which file it is; reading it raises `DeliveryError`."""
    if is_url(location):
        with open_object(location) as found:
            yield found
        return
    try:
        with Path(location).open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            yield file, status.st_size, _identity(status)
    except OSError as error:
        raise DeliveryError(f"file {location} cannot be read: {error.strerror}") from error


def stamp_of(location: str) -> object:
    """The stamp of the file that is there now; raises `DeliveryError` when there is none."""
    if is_url(location):
        return stamp_of_object(location)
    try:
        return _identity(Path(location).stat())
    except OSError as error:
        raise DeliveryError(f"file {location} was removed while it was read: {error.strerror}") from error


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
