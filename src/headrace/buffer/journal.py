"""The journal of a run: the state and the ledgers in `journal.db` (SQLite, WAL; `schema.sql`), tokens in `segments/`.

    a method per event ──bounded queue──▶ writer thread ──every COMMIT_SECONDS──▶ one transaction of the store

Events are written in the order of the calls, and only the writer thread touches the store. If the thread cannot write,
the next call raises an error. An accepted event is either written or reported, never lost silently. If the process is
killed, at most the last fraction of a second is lost, and the ledgers still balance. A power failure loses at most what
followed the last optimizer step that `step` has confirmed. `reader` reads what is committed.
"""

from __future__ import annotations

import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

import msgspec

from headrace.buffer.ledger import EndState
from headrace.buffer.reader import open_readonly
from headrace.buffer.recovery import Recovered, recover
from headrace.buffer.store import COMMIT_SECONDS, Store
from headrace.errors import DiskError, HeadraceError
from headrace.observe.records import DeliveryRecord, EvaluationRecord, SampleRecord, StepRecord
from headrace.types import POLICY, Group, Rollout, Version

__all__ = ["Event", "Journal", "Recovered", "open_readonly"]

QUEUE_EVENTS = 10_000
DEADLINE_SECONDS = 30.0
RECOVER_SECONDS = 300.0
"""The deadline of `recover`. A million rollouts take three seconds on a free core, but the core may be busy."""
T = TypeVar("T")
Event = Callable[[Store], object]
"""A function that the writer thread calls inside the next transaction."""
Queued = tuple[Event, Future[Any] | None, bool]
"""An event, the future that gets its result, and whether the transaction must be durable."""


class Journal:
    """The writing side of the journal, one in a run directory. Its methods may be called from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        keep_rollouts: bool = True,
        clock: Callable[[], float] = time.time,
        lock: BinaryIO | None = None,
    ) -> None:
        """Open or create the journal. `lock` is the lock of the run, if it is taken already (`check_resumable`)."""
        self.path = path
        self._clock = clock
        self._store = Store(path, keep_rollouts=keep_rollouts, lock=lock)
        self._name = f"the journal {path}"
        self._queue: queue.Queue[Queued] = queue.Queue(QUEUE_EVENTS)
        self._failure: HeadraceError | None = None
        self._reported = False
        self._closed = False
        self._gate = threading.Lock()
        """The lock that orders `put` and `close`, so that every event accepted before `close` is written."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def meta(self, key: str, value: Any, *, once: bool = False) -> None:
        """Record a fact about the run, as a JSON value. The last value for a key counts, or with `once` the first."""
        if once:
            self.put(
                lambda store: store.write("INSERT OR IGNORE INTO meta (key, value) VALUES (?, ?)", key, _json(value))
            )
        else:
            self._insert("meta", replace=True, key=key, value=_json(value))

    def version(self, version: Version) -> None:
        """Record that weights were published."""
        row = {**msgspec.structs.asdict(version), "digest": f"{version.digest:016x}"}
        self._insert("versions", **row, published=self._clock())

    def delivery(self, delivery: DeliveryRecord, policy: str = POLICY) -> None:
        """Record an engine's proof of a version."""
        row = msgspec.structs.asdict(delivery)
        # SQLite stores NaN as NULL, so a canary error that is not a number is stored as infinity.
        row["canary_error"] = math.inf if math.isnan(delivery.canary_error) else delivery.canary_error
        self._insert("deliveries", **row, policy=policy)

    def admitted(self, group: Group, rollout_ids: Iterable[str]) -> None:
        """Record that a group took its slot and its rollouts start."""
        when = self._clock()
        members = [(rollout_id, group.id, when) for rollout_id in rollout_ids]
        self.put(lambda store: store.admit(group, when, members))

    def partial(self, rollout: Rollout) -> None:
        """Record the next tokens of a running rollout, from which a resumed run continues.

        `rollout` holds all its traces so far, in their order, but each trace has only its tokens since the last call. A
        trace without new tokens is empty.
        """
        self.put(lambda store: store.save_partial(rollout))

    def partial_discarded(self, rollout_id: str) -> None:
        """Record that the saved tokens of a rollout are no longer part of it."""
        self.put(lambda store: store.write("DELETE FROM partials WHERE rollout = ?", rollout_id))

    def restarted(
        self, process: str, reason: str, *, steps: tuple[int, int] | None = None, regenerated_tokens: int = 0
    ) -> None:
        """Record a death or a resume. The steps after `steps[0]`, up to `steps[1]`, are trained again."""
        first, last = steps if steps is not None else (None, None)
        self._insert(
            "restarts",
            process=process,
            reason=reason,
            from_step=first,
            to_step=last,
            regenerated_tokens=regenerated_tokens,
            time=self._clock(),
        )

    def scheduled(
        self, event: Literal["admit", "complete", "consume", "swap"], *, policy: str = POLICY, **facts: Any
    ) -> None:
        """Record an event that the order of training depends on. `facts` are columns of the table `schedule`."""
        self._insert("schedule", event=event, **facts, time=self._clock(), policy=policy)

    def rollout_ended(self, rollout: Rollout) -> None:
        """Record that a rollout ended and was judged. Its tokens go to a segment: do not change it afterwards."""
        when = self._clock()
        self.put(lambda store: store.end_rollout(rollout, when))

    def rollout_dropped(self, rollout_id: str, reason: str) -> None:
        """Record that a rollout that has ended leaves its group. The group continues without it."""
        self.put(lambda store: store.drop_rollout(rollout_id, reason))

    def group_ended(self, group_id: int, state: EndState, reason: str = "", step: int | None = None) -> None:
        """Record that a group ended, and with it all its rollouts that have not ended before."""
        if (state == "trained") != (step is not None) or (state == "trained") == bool(reason):
            raise HeadraceError(
                f"group {group_id}: {state} needs {'a step' if state == 'trained' else 'a reason'} only"
            )
        when = self._clock()
        self.put(lambda store: store.end_group(group_id, state, reason, step, when))

    def step(
        self,
        step: StepRecord,
        lag_histogram: Mapping[int, int],
        metrics: Mapping[str, float | None] = {},
        policy: str = POLICY,
    ) -> Future[None]:
        """Record that an optimizer step is done now.

        When the result is done, the step and everything before it are on the disk. Do not report the step before.
        """
        lags = _json({str(lag): count for lag, count in sorted(lag_histogram.items())})
        row: dict[str, Any] = {**msgspec.structs.asdict(step), "ended": self._clock()}
        # The row may replace another: an interrupted warm start begins again at its first step.
        row |= {"lag_histogram": lags, "metrics": _json(metrics), "policy": policy}
        done: Future[None] = Future()
        self.put(lambda store: store.insert("steps", row, replace=True), done, durable=True)
        return done

    def evaluation(self, evaluation: EvaluationRecord, policy: str = POLICY) -> None:
        """Record that held-out prompts were answered and judged."""
        self._insert("evaluations", **msgspec.structs.asdict(evaluation), policy=policy)

    def sample(self, sample: SampleRecord, policy: str = POLICY) -> None:
        """Record a held-out answer for people to read."""
        self._insert("samples", **msgspec.structs.asdict(sample), policy=policy)

    def activity(
        self, *, process: str, started: float, ended: float, busy_seconds: float, generated_tokens: int = 0
    ) -> None:
        """Record how busy a process was in an interval."""
        self._insert(
            "activity",
            process=process,
            started=started,
            ended=ended,
            busy_seconds=busy_seconds,
            generated_tokens=generated_tokens,
        )

    def flush(self) -> None:
        """Wait until everything that was recorded before is committed."""
        self._call(lambda _: None)

    def recover(self, step: int, *, publish_every: int = 1, policy: str = POLICY, outcomes: bool = True) -> Recovered:
        """Recover the journal of a dead run, for one policy. What belongs to other policies stays as it is.

        The run continues from the weights of the optimizer step `step`. Steps after it can be trained again, up to
        `Recovered.resume_step`, and groups in flight are in `Recovered.unfinished`. If tokens were not kept, the groups
        of these steps are dropped instead, as "rolled back", and the groups in flight as "interrupted". A curriculum
        needs `outcomes`.
        """
        return self._call(
            lambda store: recover(store, step, self._clock(), publish_every, policy=policy, outcomes=outcomes),
            RECOVER_SECONDS,
        )

    def close(self) -> None:
        """Commit everything and end the thread. Idempotent. Raises a failure that was not reported yet."""
        with self._gate:
            if self._closed:
                return
            self._closed = True
        self._thread.join(DEADLINE_SECONDS)
        if self._thread.is_alive():
            raise HeadraceError(f"{self._name} could not be closed within {DEADLINE_SECONDS:g} s")
        if not self._reported:
            self._raise_failure()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the queue

    def put(self, event: Event, done: Future[Any] | None = None, *, durable: bool = False) -> None:
        """Queue an event. `done` gets its result at the commit. Raises if the writer is closed, dead or far behind."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        with self._gate:
            if self._closed:
                raise HeadraceError(f"{self._name} is closed")
            while True:
                self._raise_failure()
                try:
                    return self._queue.put((event, done, durable), timeout=0.05)
                except queue.Full:
                    if time.monotonic() > deadline:
                        raise HeadraceError(f"{self._name} is {QUEUE_EVENTS} events behind and takes no more") from None

    def _insert(self, table: str, *, replace: bool = False, **row: Any) -> None:
        self.put(lambda store: store.insert(table, row, replace=replace))

    def _call(self, body: Callable[[Store], T], timeout: float = DEADLINE_SECONDS) -> T:
        """Run `body` on the writer thread. Return its result when it, and everything queued before it, is committed."""
        done: Future[T] = Future()
        deadline = time.monotonic() + timeout
        self.put(body, done)
        while True:
            try:
                return done.result(0.05)
            except TimeoutError:
                self._raise_failure()
                if time.monotonic() > deadline:
                    raise HeadraceError(f"{self._name} was not written within {timeout:g} s") from None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._reported = True
            raise self._failure

    # ---- the thread

    def _run(self) -> None:
        failure: HeadraceError | None
        failure = HeadraceError(f"{self._name} cannot be written: its writer died (see the traceback)")
        try:
            while not (self._closed and self._queue.empty()):
                if events := self._collect():
                    self._commit(events)
            failure = None
        except (sqlite3.OperationalError, OSError) as error:
            failure = DiskError(
                f"{self._name} cannot be written: {error}; when that is mended, go on with "
                f"`headrace resume {self.path.parent}`"
            )
        except (sqlite3.Error, UnicodeDecodeError, HeadraceError) as error:
            failure = HeadraceError(f"{self._name} cannot be written: {error}")
        finally:
            try:
                self._store.close()
            except (sqlite3.Error, OSError) as error:
                failure = failure or DiskError(f"{self._name} cannot be closed: {error}")
            self._failure = failure

    def _collect(self) -> list[Queued]:
        """Collect the events of `COMMIT_SECONDS`, or up to the first one whose result somebody waits for."""
        events: list[Queued] = []
        deadline = time.monotonic() + COMMIT_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(events) < QUEUE_EVENTS:
            try:
                events.append(self._queue.get(timeout=left))
            except queue.Empty:
                break
            if events[-1][1] is not None:
                break
        return events

    def _commit(self, events: list[Queued]) -> None:
        with self._store.transaction(durable=any(durable for *_, durable in events)):
            results = [event(self._store) for event, *_ in events]
        for result, (_, done, _) in zip(results, events, strict=True):
            if done is not None:
                done.set_result(result)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
