"""The journal of a run: the state and the ledgers in `journal.db` (SQLite, WAL; `schema.sql`), tokens in `segments/`.

    Journal: a method per event ──▶ writer: a queue and a thread ──▶ store: the tables and the segments

If the process is killed, at most the last fraction of a second is lost, and the ledgers still balance. `reader` reads
what is committed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.buffer.ledger import EndState, count_ledgers
from headrace.buffer.reader import open_readonly
from headrace.buffer.recovery import Recovered, recover
from headrace.buffer.store import Store
from headrace.buffer.writer import DEADLINE_SECONDS, Writer
from headrace.errors import HeadraceError
from headrace.types import POLICY, Group, Rollout, Version

__all__ = ["Journal", "Recovered", "open_readonly"]

RECOVER_SECONDS = 300.0
"""The deadline of `recover`. A million rollouts take three seconds on a free core, but the core may be busy."""


class Journal:
    """The writing side of the journal. A run directory has one live journal.

    The recording methods only queue an event, and may be called from any thread.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_rollouts: bool = True,
        clock: Callable[[], float] = time.time,
        lock_seconds: float = 10.0,
    ) -> None:
        """Open or create the journal.

        `lock_seconds` is how long another SQL client may lock the file before that is an error.
        """
        self.path = path
        self._clock = clock
        self._writer = Writer(Store(path, keep_rollouts=keep_rollouts, lock_seconds=lock_seconds))

    def meta(self, key: str, value: Any) -> None:
        """Record a fact about the run, as a JSON value. The last value given for a key counts."""
        row = {"key": key, "value": _json(value)}
        self._writer.put(lambda store: store.insert("meta", row, replace=True))

    def version(self, version: Version, time: float | None = None) -> None:
        """Record that weights were published."""
        self._insert(
            "versions",
            id=version.id,
            parent=version.parent,
            step=version.step,
            digest=_hex(version.digest),
            published=self._time(time),
            policy=version.policy,
        )

    def delivery(
        self,
        *,
        version: int,
        engine: str,
        accepted: bool,
        quarantined: bool = False,
        reason: str = "",
        staged_digest: int = 0,
        live_digest: int = 0,
        canary_error: float = 0.0,
        stage_seconds: float = 0.0,
        swap_seconds: float = 0.0,
        policy: str = POLICY,
        time: float | None = None,
    ) -> None:
        """Record an engine's proof of a version."""
        # SQLite stores NaN as NULL, so a canary error that is not a number is stored as infinity.
        error = math.inf if math.isnan(canary_error) else float(canary_error)
        self._insert(
            "deliveries",
            version=version,
            engine=engine,
            accepted=int(accepted),
            quarantined=int(quarantined),
            reason=reason,
            staged_digest=_hex(staged_digest),
            live_digest=_hex(live_digest),
            canary_error=error,
            stage_seconds=float(stage_seconds),
            swap_seconds=float(swap_seconds),
            time=self._time(time),
            policy=policy,
        )

    def admitted(self, group: Group, rollout_ids: Iterable[str], time: float | None = None) -> None:
        """Record that a group took its slot and its rollouts start."""
        when = self._time(time)
        members = [(rollout_id, group.id, when) for rollout_id in rollout_ids]
        self._writer.put(lambda store: store.admit(group, when, members))

    def partial(self, rollout: Rollout) -> None:
        """Record the next tokens of a running rollout, from which a resumed run continues.

        `rollout` holds all its traces so far, in their order, but each trace has only its tokens since the last call. A
        trace without new tokens is empty.
        """
        self._writer.put(lambda store: store.save_partial(rollout))

    def partial_discarded(self, rollout_id: str) -> None:
        """Record that the saved tokens of a rollout are no longer part of it."""
        self._writer.put(lambda store: store.forget_partial(rollout_id))

    def restarted(
        self,
        process: str,
        reason: str,
        *,
        steps: tuple[int, int] | None = None,
        regenerated_tokens: int = 0,
        time: float | None = None,
    ) -> None:
        """Record that a process died, or that a run is resumed.

        The steps after `steps[0]`, up to `steps[1]`, are trained again.
        """
        first, last = steps if steps is not None else (None, None)
        self._insert(
            "restarts",
            process=process,
            reason=reason,
            from_step=first,
            to_step=last,
            regenerated_tokens=int(regenerated_tokens),
            time=self._time(time),
        )

    def scheduled(
        self,
        event: Literal["admit", "complete", "consume", "swap"],
        *,
        group_id: int | None = None,
        step: int | None = None,
        version: int | None = None,
        engine: str | None = None,
        policy: str = POLICY,
        time: float | None = None,
    ) -> None:
        """Record an event that the order of training depends on."""
        self._insert(
            "schedule",
            event=event,
            group_id=group_id,
            step=step,
            version=version,
            engine=engine,
            time=self._time(time),
            policy=policy,
        )

    def rollout_ended(self, rollout: Rollout, time: float | None = None) -> None:
        """Record that a rollout ended and was judged; its tokens go to a segment.

        Do not change the rollout afterwards.
        """
        when = self._time(time)
        self._writer.put(lambda store: store.end_rollout(rollout, when))

    def rollout_dropped(self, rollout_id: str, reason: str) -> None:
        """Record that a rollout that has ended leaves its group. The group continues without it."""
        self._writer.put(lambda store: store.drop_rollout(rollout_id, reason))

    def group_ended(
        self, group_id: int, state: EndState, reason: str = "", step: int | None = None, time: float | None = None
    ) -> None:
        """Record that a group ended, and with it all its rollouts that have not ended before."""
        if (state == "trained") != (step is not None) or (state == "trained") == bool(reason):
            raise HeadraceError(
                f"group {group_id}: {state} needs {'a step' if state == 'trained' else 'a reason'} only"
            )
        when = self._time(time)
        self._writer.put(lambda store: store.end_group(group_id, state, reason, step, when))

    def step(
        self,
        *,
        step: int,
        version: int,
        objective: str,
        groups: int,
        rollouts: int,
        tokens: int,
        trained_tokens: int,
        lag_histogram: Mapping[int, int],
        reward_mean: float | None = None,
        loss: float | None = None,
        grad_norm: float | None = None,
        learning_rate: float | None = None,
        seconds: float | None = None,
        metrics: Mapping[str, float] | None = None,
        policy: str = POLICY,
        time: float | None = None,
    ) -> None:
        """Record that an optimizer step is done."""
        lags = _json({str(lag): int(count) for lag, count in sorted(lag_histogram.items())})
        reals = {
            "reward_mean": reward_mean,
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "seconds": seconds,
        }
        self._insert(
            "steps",
            replace=True,  # An interrupted warm start begins again at its first step.
            step=step,
            version=version,
            objective=objective,
            groups=groups,
            rollouts=rollouts,
            tokens=tokens,
            trained_tokens=trained_tokens,
            lag_histogram=lags,
            **{key: None if value is None else float(value) for key, value in reals.items()},
            ended=self._time(time),
            metrics=_json(dict(metrics or {})),
            policy=policy,
        )

    def evaluation(
        self,
        *,
        version: int,
        moment: Literal["before", "during", "after"],
        prompts: int,
        samples: int,
        pass_1: float,
        pass_k: float,
        reward_mean: float,
        tokens_mean: float,
        started: float,
        ended: float,
        policy: str = POLICY,
    ) -> None:
        """Record that held-out prompts were answered and judged."""
        self._insert(
            "evaluations",
            version=version,
            moment=moment,
            prompts=prompts,
            samples=samples,
            pass_1=float(pass_1),
            pass_k=float(pass_k),
            reward_mean=float(reward_mean),
            tokens_mean=float(tokens_mean),
            started=started,
            ended=ended,
            policy=policy,
        )

    def sample(
        self,
        *,
        version: int,
        moment: str,
        prompt: str,
        question: str,
        answer: str,
        reward: float | None,
        policy: str = POLICY,
    ) -> None:
        """Record a held-out answer for people to read."""
        self._insert(
            "samples",
            version=version,
            moment=moment,
            prompt=prompt,
            question=question,
            answer=answer,
            reward=None if reward is None else float(reward),
            policy=policy,
        )

    def activity(
        self, *, process: str, started: float, ended: float, busy_seconds: float, generated_tokens: int = 0
    ) -> None:
        """Record how busy a process was in an interval."""
        self._insert(
            "activity",
            process=process,
            started=started,
            ended=ended,
            busy_seconds=float(busy_seconds),
            generated_tokens=int(generated_tokens),
        )

    def flush(self, timeout: float = DEADLINE_SECONDS) -> None:
        """Wait until everything that was recorded before is committed."""
        self._writer.call(lambda _: None, timeout)

    def counts(self, timeout: float = DEADLINE_SECONDS, *, policy: str | None = None) -> dict[str, dict[str, Any]]:
        """Return both ledgers from the journal, of one policy or of all, in the form of `Ledgers.as_dict`."""
        return self._writer.call(lambda store: count_ledgers(store.db, policy), timeout)

    def recover(
        self,
        step: int | None = None,
        *,
        publish_every: int = 1,
        policy: str = POLICY,
        outcomes: bool = True,
        timeout: float = RECOVER_SECONDS,
    ) -> Recovered:
        """Recover the journal of a dead run, for one policy.

        Groups, versions and steps of other policies stay as they are.

        With `step`, the run continues from the weights of that optimizer step. Steps after it can be trained again, up
        to `Recovered.resume_step`, and groups in flight are in `Recovered.unfinished`. If tokens were not kept, the
        groups of these steps are dropped instead, as "rolled back", and the groups in flight as "interrupted". Without
        `step`, the groups in flight are dropped as "interrupted". A curriculum needs `outcomes`.
        """
        return self._writer.call(
            lambda store: recover(store, step, self._clock(), publish_every, policy=policy, outcomes=outcomes), timeout
        )

    def close(self, timeout: float = DEADLINE_SECONDS) -> None:
        """Commit everything and close the file. Idempotent. Raises a failure that was not reported yet."""
        self._writer.close(timeout)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _time(self, given: float | None) -> float:
        return self._clock() if given is None else float(given)

    def _insert(self, table: str, *, replace: bool = False, **row: Any) -> None:
        self._writer.put(lambda store: store.insert(table, row, replace=replace))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _hex(digest: int) -> str:
    return f"{digest & (2**64 - 1):016x}"
