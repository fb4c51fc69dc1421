"""The register of waits: who waits for what, and since when. `status.json` shows it in a live run.

No loop of the pipeline waits without being registered here. A wait ends when its condition holds. The condition is
checked again whenever `ring` is called, and at least once a second. If nothing has made progress for too long, the
watch loop reports all waits in a `StallError`. An engine that has requests and sends no token for too long is stuck and
is treated as dead.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.errors import StallError, UserError
from headrace.run_dir import RunDir

LOOK_SECONDS = 1.0
LATE_SECONDS = 5.0
"""If the status is older than this, the controller hangs or was killed."""


class Wait(msgspec.Struct, frozen=True):
    """One registered wait."""

    owner: str
    what: str
    seconds: float

    def __str__(self) -> str:
        verb = "wait" if self.owner.endswith((" requests", " questions")) else "waits"
        return f"{self.owner} {verb} for {self.what}, since {self.seconds:.0f} s"


class Waits:
    """The register of waits, and the bell that wakes them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._moved = clock()
        self._bell = asyncio.Event()
        self._book: dict[str, tuple[Callable[[], str], float]] = {}

    def ring(self) -> None:
        """Make every wait check its condition again, because something has changed."""
        bell, self._bell = self._bell, asyncio.Event()
        bell.set()

    def moved(self) -> None:
        """Record that the run has made progress (tokens, a step, a delivery), and wake every wait."""
        self._moved = self._clock()
        self.ring()

    async def until(self, owner: str, what: Callable[[], str], condition: Callable[[], bool]) -> None:
        """Wait until the condition holds. `what` returns, in words and at the time of the call, what is waited for."""
        if condition():
            return
        self._book[owner] = (what, self._clock())
        try:
            while not condition():
                # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the bell.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._bell.wait()
        finally:
            del self._book[owner]

    def entries(self) -> list[Wait]:
        """Return every wait, the longest first."""
        now = self._clock()
        book = sorted(self._book.items(), key=lambda item: item[1][1])
        return [Wait(owner, what(), now - since) for owner, (what, since) in book]

    @property
    def still(self) -> float:
        """The seconds since the run last made progress."""
        return self._clock() - self._moved

    def check(self, limit: float, others: Sequence[Wait] = ()) -> None:
        """Raise `StallError` if nothing has made progress for `limit` seconds. `others` are waits to report too."""
        if self.still > limit:
            waits = "; ".join(map(str, [*self.entries(), *others])) or "nobody waits"
            raise StallError(f"no progress for {self.still:.0f} s: {waits}")


def scorer_waits(silent: Mapping[str, tuple[int, float]]) -> list[Wait]:
    """Return the waits for answers of scorers. `silent` is what `OpenQuestions.silent` returns."""
    return [
        Wait(f"{n} question" + "s" * (n != 1), f"an answer of {who}", seconds) for who, (n, seconds) in silent.items()
    ]


class EngineWatch:
    """The record of when each engine last made progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def progress(self, name: str) -> None:
        """Record that this engine sent tokens, or the end of a request."""
        self._seen[name] = self._clock()

    def forget(self, name: str) -> None:
        """Forget when this engine last made progress, because it is away or has no requests. Its time starts anew."""
        self._seen.pop(name, None)

    def waits(self, running: Mapping[str, int]) -> list[Wait]:
        """Return the wait for the next token of every engine that has requests. `running` counts them by engine."""
        now = self._clock()
        return [
            Wait(f"{n} request" + "s" * (n != 1), f"a token of {name}", now - self._seen.get(name, now))
            for name, n in running.items()
            if n
        ]

    def stuck(self, running: Mapping[str, int], limit: float) -> list[str]:
        """Return the engines that have had requests for more than `limit` seconds without progress on any of them."""
        now, found = self._clock(), []
        for name, requests in running.items():
            if not requests:
                self.forget(name)
            elif now - self._seen.setdefault(name, now) > limit:
                found.append(name)
        return found


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, as in `status.json`."""

    time: float
    pid: int
    phase: str
    still: float
    """The seconds since anything made progress."""
    limit: float
    """The value of `[pipeline] stall_seconds`."""
    waits: list[Wait]
    processes: dict[str, str]
    """The phase that each process reports, by process."""


def read_status(path: str | Path) -> Status:
    """Read the status of a live run. Raises `UserError` if no run is live in this directory."""
    run_dir, _ = RunDir.open(path)
    try:
        return msgspec.json.decode(run_dir.status.read_bytes(), type=Status)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no run lives there (it has no status.json)") from error
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{run_dir.status} is damaged: {error}") from error


def describe(status: Status) -> str:
    """Describe a status for people: what makes progress, who waits for whom, what each process does."""
    age = time.time() - status.time
    lines = [f"{status.phase}; something moved {status.still:.0f} s ago (a stall after {status.limit:g} s)"]
    if age > LATE_SECONDS:
        lines = [f"the controller (process {status.pid}) has written nothing for {age:.0f} s: it hangs, or was killed"]
    lines += [f"  {wait}" for wait in status.waits]
    lines += [f"  {name}: {phase}" for name, phase in sorted(status.processes.items())]
    return "\n".join(lines)
