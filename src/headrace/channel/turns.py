"""Whose turn it is on a GPU that a trainer and engines share: the trainer's for a whole step, else the engines'.

Two processes that fill one GPU do not overlap: the driver gives each a slice of the time, and both wait for half of it.
Taking turns costs no time and lets each finish what it began. The turn is a lock on a file, which a process that dies
gives back; a byte in the file says that the trainer waits, so that engines need not try the lock to find out.
"""

from __future__ import annotations

import fcntl
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import DeadlineError

FILE = "gpu-turn"
"""In the run directory."""
_POLL_SECONDS = 2e-4


class _Turns:
    """The file and its byte."""

    def __init__(self, path: Path) -> None:
        # Opened by every process for itself: a lock belongs to the opened file.
        with path.open("ab") as file:
            if file.tell() == 0:
                file.write(b"\0")
        self._file = path.open("r+b")
        self._wanted = mmap.mmap(self._file.fileno(), 1)
        self._held = False

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._held = True
        return True

    def give(self) -> None:
        """Let others have it. Idempotent."""
        if self._held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._held = False

    def close(self) -> None:
        """Give it back for ever. Idempotent."""
        if not self._file.closed:
            self.give()
            self._wanted.close()
            self._file.close()


class TrainerTurns(_Turns):
    """The trainer's end; there is one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # A trainer before this one may have died while it waited.
        self._wanted[0] = 0

    @contextmanager
    def held(self, deadline: float) -> Iterator[float]:
        """Inside, no engine computes; gives the seconds that it took to get there."""
        started = time.monotonic()
        self._wanted[0] = 1
        try:
            while not self._try(fcntl.LOCK_EX):
                if time.monotonic() - started > deadline:
                    raise DeadlineError(f"no engine has let go of the GPU within {deadline:g} s")
                time.sleep(_POLL_SECONDS)
        finally:
            self._wanted[0] = 0
        try:
            yield time.monotonic() - started
        finally:
            self.give()


class EngineTurns(_Turns):
    """An engine's end; several engines may compute at the same time."""

    @property
    def wanted(self) -> bool:
        """Whether the trainer waits: finish what is under way, and `give`."""
        return self._wanted[0] != 0

    def take(self) -> bool:
        """Whether the engine may compute now; what it has, it keeps until it gives it."""
        if self._held:
            return True
        # Who asks again at once would often be faster than a trainer that has waited longer.
        return not self.wanted and self._try(fcntl.LOCK_SH)
