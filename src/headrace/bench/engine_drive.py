"""Drives an `EngineCore` and times it: from submit to the last token, prompts included, log-probabilities recorded.

Every request must end with all of its tokens; one that does not is an error, never a lower figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.engines.base import Delta, Request
from headrace.engines.embedded.core import EngineCore
from headrace.errors import HeadraceError, StallError
from headrace.types import Float32Array, Int32Array

STALL_SECONDS = 300.0
"""Steps that give no token for so long are a stall."""


@dataclass(frozen=True)
class DrawnAnswer:
    """All that one request got."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array


@dataclass
class ProgressMark:
    """Where a run stands at one moment."""

    seconds: float
    steps: int
    tokens: int


@dataclass
class Round:
    """One timed round."""

    answers: list[DrawnAnswer] = field(default_factory=list)
    """In the order of the requests."""
    seconds: float = 0.0
    steps: int = 0
    decode_steps: int = 0
    """Steps that computed no prompt token."""
    decode_seconds: float = 0.0
    host_seconds: float | None = None
    device_seconds: float | None = None
    prefilled: int = 0
    preemptions: int = 0
    full_until: ProgressMark | None = None
    """When nobody waited for a place any more."""
    tail_from: ProgressMark | None = None
    """When only the tail was left."""

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(answer.token_ids) for answer in self.answers)


class Driver:
    """Steps one core until its requests are done."""

    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.core = core
        self._clock = clock
        self._deltas: dict[str, list[Delta]] = {}
        self._open: set[str] = set()
        self._calls = 0
        self._alive = 0.0

    def run(
        self, requests: Sequence[Request], *, tail_rows: int = 0, between: Callable[[], None] | None = None
    ) -> Round:
        """Submit all, step until every one has ended. `between` is called before every step."""
        timings = getattr(self.core, "timings", None)  # filled by GPU runners
        if timings is not None:
            timings.reset()
        before = stats = self.core.counters()
        run, first_step = Round(), self._steps()
        started = now = self._clock()
        self.submit(requests)
        while self._open:
            if between is not None:
                between()
            steps, then, prefilled = self._steps(), now, stats.prefilled_tokens
            self.step()
            now, stats = self._clock(), self.core.counters()
            if stats.prefilled_tokens == prefilled:
                run.decode_steps += self._steps() - steps
                run.decode_seconds += now - then
            mark = ProgressMark(
                now - started, self._steps() - first_step, stats.generated_tokens - before.generated_tokens
            )
            if run.full_until is None and not stats.waiting:
                run.full_until = mark
            if tail_rows and run.tail_from is None and len(self._open) <= tail_rows:
                run.tail_from = mark
        run.seconds, run.steps = now - started, self._steps() - first_step
        run.prefilled = stats.prefilled_tokens - before.prefilled_tokens
        run.preemptions = stats.preemptions - before.preemptions
        if timings is not None:
            run.host_seconds, run.device_seconds = float(timings.host_seconds), float(timings.device_seconds)
        run.answers = [self.answer(request) for request in requests]
        return run

    def submit(self, requests: Sequence[Request]) -> None:
        """Give the engine these requests."""
        self._open.update(request.id for request in requests)
        self._deltas |= {request.id: [] for request in requests}
        self._alive = self._clock()
        self.core.submit(requests)

    def step(self) -> None:
        """One step; what it answered is kept."""
        self._calls += 1
        tokens = self.core.counters().generated_tokens
        self.take(self.core.step())
        if self.core.counters().generated_tokens > tokens:
            self._alive = self._clock()
        elif self._clock() - self._alive > STALL_SECONDS:
            raise StallError(f"the engine gave no token for {STALL_SECONDS:g} s")

    def take(self, deltas: Sequence[Delta]) -> None:
        """Keep these deltas."""
        for delta in deltas:
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            self._deltas[delta.id].append(delta)
            if delta.finish is not None:
                self._open.remove(delta.id)

    def answer(self, request: Request, *, whole: bool = True) -> DrawnAnswer:
        """What a request got so far, in one piece; with `whole` it must be all that it asked for."""
        deltas = self._deltas[request.id]
        answer = DrawnAnswer(
            np.concatenate([np.empty(0, np.int32), *(d.token_ids for d in deltas)]),
            np.concatenate([np.empty(0, np.float32), *(d.logprobs for d in deltas)]),
            np.concatenate([np.empty(0, np.int32), *(d.versions for d in deltas)]),
        )
        wanted = request.sampling.max_tokens
        if whole and not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == wanted:
            raise HeadraceError(f"request {request.id} ended with {len(answer.token_ids)} of {wanted} tokens")
        return answer

    def _steps(self) -> int:
        timings: Any = getattr(self.core, "timings", None)  # filled by GPU runners
        return self._calls if timings is None else int(timings.steps)
