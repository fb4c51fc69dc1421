"""What stands for the run directory on a host that does not have it: a private directory, and a log that is sent on.

All workers of one start of a run that are on the same host share the directory. Each holds a lock on it, which the
system releases however the process ends. A later worker on this host removes directories that nobody holds any more.
"""

import codecs
import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from headrace.cluster.socket_dir import sweep_socket_dirs
from headrace.errors import HeadraceError

PREFIX = "headrace-host-"
LOG_BYTES = 1 << 18
"""The most bytes of a log that are sent at once. A log that grows faster is sent later."""


class HostDir:
    """The directory that stands for a run directory on this host, until this process ends."""

    def __init__(self, token: str, run: str) -> None:
        """Create the directory, or share the one that another worker has created for the same `token`.

        `run` is the name of the run, and of the directory inside.
        """
        sweep_socket_dirs(PREFIX)
        while True:
            outer = Path(tempfile.gettempdir()) / f"{PREFIX}{token}"
            outer.mkdir(mode=0o700, exist_ok=True)
            self._lock = os.open(outer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            status = os.fstat(self._lock)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise HeadraceError(f"{outer} belongs to somebody else, or others can read it")
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            if os.fstat(self._lock).st_nlink and outer.exists():
                break
            os.close(self._lock)  # Another worker swept it before it was locked.
        self.path = outer / run
        self.path.mkdir(exist_ok=True)
        self._outer = outer

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write the files that came over the link, readable by this user alone. Each is replaced as a whole."""
        for name, data in files.items():
            path = self.path / name
            if path.parent != self.path:
                raise HeadraceError(f"{name!r} is not the name of a file of a run")
            part = path.with_name(f".{name}.{os.getpid()}")
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            part.replace(path)

    def close(self) -> None:
        """Remove the directory if no other worker of this run is left on this host. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            sweep_socket_dirs(PREFIX)


def redirect_output(file: BinaryIO) -> None:
    """Send all output of this process, also that of libraries, to this file."""
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


class HostLog:
    """The log of a worker on another host than the controller's: its output goes to a file, and from there on."""

    def __init__(self) -> None:
        """Send all output of this process to a file that only this process knows."""
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        redirect_output(self._file)
        # Writers of a copied descriptor share its position, so the log is read from a position of its own.
        self._read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def new_text(self) -> str:
        """Return what was written since the last call, at most `LOG_BYTES` of it."""
        data = os.pread(self._file.fileno(), LOG_BYTES, self._read)
        self._read += len(data)
        return self._decoder.decode(data)
