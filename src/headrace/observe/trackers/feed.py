"""The trackers of a run get every record as soon as it is written. Their failures and waits never reach the run.

One thread that nothing else uses calls a tracker, so a tracker may wait for a network. A tracker that raises, or that
falls too far behind, is switched off with one note, and the run continues. Closing has a deadline.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.observe.trackers.base import Record, Tracker, find_tracker
from headrace.reference import describe

ROOM = 10_000
"""The number of records that may wait for a tracker."""
POLL_SECONDS = 1.0
CLOSE_SECONDS = 10.0
"""Seconds that all trackers together have for the remaining records when the run ends."""


class Trackers:
    """The trackers of one run. Not thread-safe: one thread uses it."""

    def __init__(
        self,
        references: Sequence[str],
        run: str,
        config: Mapping[str, Any],
        note: Callable[[str], None],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Load and start the trackers, each with its options. Built-in ones keep their ids in `folder`.

        `note` is called for each tracker that is switched off.
        """
        self._note = note
        makers = {name: find_tracker(name, (options or {}).get(name, {}), folder) for name in references}
        self._feeds = [_Feed(name, make, run, config) for name, make in makers.items()]

    def log(self, record: Record) -> None:
        """Hand a record to every tracker. Never waits."""
        for feed in self._feeds:
            feed.log(record)
        self._drop_failed()

    def close(self) -> None:
        """Let all trackers finish and close, within `CLOSE_SECONDS`. Idempotent."""
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.log(None)
        for feed in self._feeds:
            feed.join(deadline)
        self._drop_failed()
        self._feeds = []

    def _drop_failed(self) -> None:
        for feed in [feed for feed in self._feeds if feed.failure]:
            self._note(f"[observe] trackers: {feed.reference} {feed.failure}; it is switched off")
            self._feeds.remove(feed)


class _Feed:
    """One tracker, its thread, and the records that wait for it."""

    def __init__(self, reference: str, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        self.reference = reference
        self.failure = ""
        """Why the tracker gets no more records; empty while it gets them."""
        self._records: queue.Queue[Record | None] = queue.Queue(ROOM)
        self._thread = threading.Thread(
            target=self._serve, args=(make, run, config), name=f"tracker {reference}", daemon=True
        )
        self._thread.start()

    def log(self, record: Record | None) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self.failure = self.failure or f"is {ROOM} records behind"

    def join(self, deadline: float) -> None:
        """Wait until the tracker is closed. Records end with None."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self.failure = self.failure or f"did not close in {CLOSE_SECONDS:g} s"

    def _serve(self, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        try:
            self._follow(make, run, config)
        except UserError as error:
            self.failure = str(error)

    def _follow(self, make: Callable[[], Tracker], run: str, config: Mapping[str, Any]) -> None:
        """Give the tracker its records until the run ends. Whatever the user's code raises becomes a `UserError`."""
        try:
            tracker = make()
            tracker.start(run, config)
            try:
                while (record := self._next()) is not None:
                    tracker.log(record)
            finally:
                tracker.close()
        except (Exception, SystemExit) as error:
            raise UserError(f"raised {describe(error)}") from error

    def _next(self) -> Record | None:
        """Return the next record; None when the run has ended or the tracker is switched off."""
        while not self.failure:
            with suppress(queue.Empty):
                return self._records.get(timeout=POLL_SECONDS)
        return None
