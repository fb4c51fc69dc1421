"""The storage of the `file` transport: a directory of a mounted file system, or a folder behind an fsspec URL.

In both, a version's file is complete or absent, is never written to again, and is written by one trainer. This module
does not import torch.
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
    """The writer's end, valid from its creation to `remove`. All methods raise `DeliveryError` on failure."""

    mounted: bool
    """Whether locations are paths of files that can be mapped into memory."""

    def location_of(self, version: int) -> str:
        """Return the location where readers find a version."""
        ...

    def write(self, location: str, layout: FileLayout, chunks: Sequence[memoryview]) -> None:
        """Write the layout's header and these chunks; the complete file then appears under its name at once."""
        ...

    def delete(self, location: str) -> None:
        """Remove a version; it is no error if the version is gone."""
        ...

    def remove(self) -> None:
        """Remove everything that this writer created."""
        ...


def storage_at(directory: Path | str, owner: str) -> Storage:
    """Open the storage at this path or URL; `owner` is the name of the run, which stores without locks record."""
    if is_url(directory):
        return ObjectFolder(str(directory), owner)
    return Directory(Path(directory).absolute())


def sweep_storage(directory: Path | str, owner: str) -> bool:
    """Remove what a dead trainer of this run left.

    Returns False if there is nothing, if the writer is alive or of another run, or if the storage cannot be reached.
    """
    if not is_url(directory):
        return sweep_directory(Path(directory))
    try:
        return sweep_folder(str(directory), owner)
    except (DeliveryError, ConfigError):
        return False


@contextlib.contextmanager
def opened(location: str) -> Iterator[tuple[BinaryIO, int, object]]:
    """Open a published file; yield it with its size and a stamp that identifies this file.

    Errors while opening and reading are raised as `DeliveryError`.
    """
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
    """Return the stamp of the file that is there now; raises `DeliveryError` if there is none."""
    if is_url(location):
        return stamp_of_object(location)
    try:
        return _identity(Path(location).stat())
    except OSError as error:
        raise DeliveryError(f"file {location} was removed while it was read: {error.strerror}") from error


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
