"""What launchers report about workers that ended: a queue of exits, and the last lines of a worker's output.

Every start of a worker is reported once when it ends. An error in a task that watches workers is raised by `next_exit`,
because that task would miss an exit.
"""

import asyncio
import os
from pathlib import Path
from typing import BinaryIO

from headrace.cluster.launchers.base import Exit
from headrace.errors import one_line

LAST_LINES = 12
LAST_BYTES = 1 << 16


class ExitQueue:
    """The part of a `Launcher` that reports exits."""

    def __init__(self) -> None:
        self._exits: asyncio.Queue[Exit | BaseException] = asyncio.Queue()

    async def next_exit(self) -> Exit:
        """See `Launcher.next_exit`. Raises the error of a task that watches workers."""
        found = await self._exits.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _own(self, watcher: asyncio.Task[None]) -> asyncio.Task[None]:
        """Have `next_exit` raise the error that ends this task, if one does."""

        def ended(watcher: asyncio.Task[None]) -> None:
            if not watcher.cancelled() and (error := watcher.exception()) is not None:
                self._exits.put_nowait(error)

        watcher.add_done_callback(ended)
        return watcher


def last_lines(file: BinaryIO, start: int = 0) -> str:
    """Return the last lines of an open file, of those after its first `start` bytes.

    The position in the file, which a worker that writes to the file may share, does not change.
    """
    size = os.fstat(file.fileno()).st_size
    text = os.pread(file.fileno(), LAST_BYTES, max(start, size - LAST_BYTES)).decode(errors="replace")
    return "\n".join(one_line(line) for line in text.strip().splitlines()[-LAST_LINES:])


def log_end(log: Path, start: int = 0) -> str:
    """Return the last lines of a log, of those after its first `start` bytes; empty if there is no log."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        return last_lines(file, start)
