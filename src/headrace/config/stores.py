"""Stores behind fsspec URLs. Whatever a store's own library raises becomes one line, in an exception of Headrace."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError, HeadraceError

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


def is_url(directory: Path | str) -> bool:
    """Return whether this is a URL for fsspec and not a path."""
    return isinstance(directory, str) and "://" in directory


def has_directories(url: str) -> bool:
    """Return whether the folders of this store must be made and removed."""
    return url.split("://", 1)[0] in _WITH_DIRECTORIES


def connect(url: str, key: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    Raises `ConfigError`, which names the `key` of the configuration, if no package for the URL is installed.
    """
    import fsspec

    try:
        found, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key}: {url} cannot be used: {_line(error)}") from error
    return found, str(path)


@contextlib.contextmanager
def store_errors(kind: type[HeadraceError], what: str) -> Iterator[None]:
    """Raise the errors of a store as errors of this kind. `what` begins their one line."""
    try:
        yield
    except _errors() as error:
        raise kind(f"{what}: {_line(error)}") from error


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that a store may raise. Called after an error, when the library that raised it is loaded."""
    loaded = ((sys.modules[module], name) for module, name in _FOREIGN_ERRORS.items() if module in sys.modules)
    return (OSError, ValueError, RuntimeError, ConfigError, *(getattr(module, name) for module, name in loaded))


def _line(error: BaseException) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(reason.split()) or type(error).__name__
