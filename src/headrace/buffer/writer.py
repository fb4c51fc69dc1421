"""The thread that writes a journal.

    put, call ──bounded queue──▶ writer thread ──every COMMIT_SECONDS──▶ one transaction of the store

Events are written in the order of the calls, and only this thread touches the store. If the thread cannot write, the
next call raises an error. An accepted event is either written or reported, never lost silently.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.buffer.store import Store
from headrace.errors import HeadraceError

COMMIT_SECONDS = 0.1
QUEUE_EVENTS = 10_000
DEADLINE_SECONDS = 30.0
T = TypeVar("T")
Event = Callable[[Store], object]
"""A function that the writer thread calls inside the next transaction."""


class Call(Generic[T]):
    """A function to run on the writer thread. The caller waits until the function's transaction is committed."""

    def __init__(self, body: Callable[[Store], T]) -> None:
        self.body = body
        self.done = threading.Event()
        self.result: T

    def __call__(self, store: Store) -> None:
        """Run the function, on the writer thread."""
        self.result = self.body(store)


class Writer:
    """The owner of the writer thread and of the store, which is closed when the thread ends.

    All methods may be called from any thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._name = f"the journal {store.path}"
        self._queue: queue.Queue[Event] = queue.Queue(QUEUE_EVENTS)
        self._failure: str | None = None
        self._reported = False
        self._closed = False
        self._gate = threading.Lock()
        """The lock that orders `put` and `close`, so that every event accepted before `close` is written."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event. Raises if the writer has failed, is closed, or stays too far behind for too long."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        with self._gate:
            if self._closed:
                raise HeadraceError(f"{self._name} is closed")
            while not self._try_put(event):
                if time.monotonic() > deadline:
                    raise HeadraceError(f"{self._name} is {QUEUE_EVENTS} events behind and takes no more")

    def call(self, body: Callable[[Store], T], timeout: float) -> T:
        """Run `body` on the writer thread. Return its result when it, and everything queued before it, is committed."""
        call = Call(body)
        deadline = time.monotonic() + timeout
        self.put(call)
        while not call.done.wait(0.05):
            self._raise_failure()
            if time.monotonic() > deadline:
                raise HeadraceError(f"{self._name} was not written within {timeout:g} s")
        return call.result

    def close(self, timeout: float) -> None:
        """Commit everything and end the thread. Idempotent. Raises a failure that was not reported yet."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise HeadraceError(f"{self._name} could not be closed within {timeout:g} s")
        if not self._reported:
            self._raise_failure()

    def _try_put(self, event: Event) -> bool:
        self._raise_failure()
        try:
            self._queue.put(event, timeout=0.05)
        except queue.Full:
            return False
        return True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._reported = True
            raise HeadraceError(self._failure)

    # ---- the thread

    def _run(self) -> None:
        finished = False
        try:
            while not (self._closed and self._queue.empty()):
                self._commit(self._collect())
            finished = True
        except (sqlite3.Error, OSError, HeadraceError) as error:
            self._failure = f"{self._name} cannot be written: {error}"
        finally:
            if not finished and self._failure is None:
                self._failure = f"{self._name} cannot be written: its writer died (see the traceback)"
            self._let_go()

    def _collect(self) -> list[Event]:
        """Collect the events of the next commit: those of `COMMIT_SECONDS`, or up to the first `Call`."""
        events: list[Event] = []
        deadline = time.monotonic() + COMMIT_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(events) < QUEUE_EVENTS:
            try:
                events.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
            if isinstance(events[-1], Call):
                break
        return events

    def _commit(self, events: list[Event]) -> None:
        if not events:
            return
        with self._store.transaction():
            for event in events:
                event(self._store)
        for event in events:
            if isinstance(event, Call):
                event.done.set()

    def _let_go(self) -> None:
        try:
            self._store.close()
        except (sqlite3.Error, OSError) as error:
            self._failure = self._failure or f"{self._name} cannot be closed: {error}"
