"""Directories for the sockets of a controller, or of a daemon that the controller started.

Each directory lasts as long as its owner, the controller. The owner holds a lock on its directory, which the system
releases however the process ends. The next run on this host removes directories that were left behind.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

PREFIX = "headrace-sockets-"


class SocketDir:
    """A new directory that this process owns until `remove`."""

    def __init__(self, prefix: str = PREFIX) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)  # Another run swept it before it was locked.

    def remove(self) -> None:
        """Remove the directory and release the lock. Idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep_socket_dirs(prefix: str = PREFIX, end: Callable[[Path], None] = lambda path: None) -> list[str]:
    """Remove this user's directories whose owner is dead, and return their names.

    `end` is called before a directory is removed, to end whatever still uses the directory. If `end` raises an
    `OSError`, the directory stays.
    """
    swept = []
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # It is gone meanwhile, or belongs to another user.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end(path)
            shutil.rmtree(path)
            swept.append(path.name)
        except OSError:  # Its owner is alive or another user, or `end` failed.
            continue
        finally:
            os.close(lock)
    return swept
