"""Turns on a GPU that a trainer and engines share: the trainer has the GPU for a whole step, the engines otherwise.

Two processes that fill one GPU do not overlap: the driver slices its time, and each process waits half of the time.
Taking turns costs nothing and lets each process finish what it began. The turn is a lock on a file, so a process that
dies releases it. A byte in the file says that the trainer waits, so that engines need not try the lock to find out.
"""

import fcntl
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.errors import DeadlineError

FILE = "gpu-turn"
"""The name of the lock file in the run directory."""
_POLL_SECONDS = 2e-4


class _Turns:
    """The lock file and its byte. Base class of the trainer's and the engines' ends."""

    def __init__(self, path: Path) -> None:
        # Every process opens the file for itself, because a lock belongs to the open file.
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
        """Release the lock, so that others can take it. Idempotent."""
        if self._held:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._held = False

    def close(self) -> None:
        """Release the lock and close the file. Idempotent."""
        if not self._file.closed:
            self.give()
            self._wanted.close()
            self._file.close()


class TrainerTurns(_Turns):
    """The trainer's end. There is only one per file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # The previous trainer process may have died while it waited.
        self._wanted[0] = 0

    @contextmanager
    def held(self, deadline: float) -> Iterator[float]:
        """Hold the GPU: inside this context no engine computes. Yields the seconds spent waiting.

        Raises `DeadlineError` if the engines do not release the GPU within `deadline` seconds.
        """
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
    """An engine's end. Several engines may compute at the same time."""

    @property
    def wanted(self) -> bool:
        """Whether the trainer waits. The engine should then finish its running work and call `give`."""
        return self._wanted[0] != 0

    def take(self) -> bool:
        """Return whether the engine may compute now. A turn that was taken lasts until `give`."""
        if self._held:
            return True
        # An engine that asks again at once would often be faster than a trainer that has waited longer.
        return not self.wanted and self._try(fcntl.LOCK_SH)
