"""Drives an `EngineCore` and times it, from the submit to the last token. Prompts are included.

Every request must end with all of its tokens. If one does not, the benchmark fails instead of showing a lower figure.
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
"""If no step gives a token for this long, the engine is stalled."""


@dataclass(frozen=True)
class DrawnAnswer:
    """All tokens of one request, with their records."""

    token_ids: Int32Array
    logprobs: Float32Array
    versions: Int32Array


@dataclass
class ProgressMark:
    """How far a round has come at one moment."""

    seconds: float
    steps: int
    tokens: int


@dataclass
class Round:
    """The measurements of one round of requests."""

    answers: list[DrawnAnswer] = field(default_factory=list)
    """The answers, in the order of the requests."""
    seconds: float = 0.0
    steps: int = 0
    decode_steps: int = 0
    """The number of steps that computed no prompt token."""
    decode_seconds: float = 0.0
    host_seconds: float | None = None
    device_seconds: float | None = None
    prefilled: int = 0
    preemptions: int = 0
    full_until: ProgressMark | None = None
    """The moment from which no request waited for a slot any more."""
    tail_from: ProgressMark | None = None
    """The moment from which only the requests of the tail were left; None if the round has no tail."""

    @property
    def tokens(self) -> int:
        """The number of generated tokens."""
        return sum(len(answer.token_ids) for answer in self.answers)


class Driver:
    """Runs the steps of one core and collects the answers of its requests."""

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
        """Submit all requests, and run steps until every request has ended.

        `between` is called before every step. The tail begins when at most `tail_rows` requests are left.
        """
        timings = getattr(self.core, "timings", None)  # GPU runners fill these in.
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
        """Submit these requests to the engine."""
        self._open.update(request.id for request in requests)
        self._deltas |= {request.id: [] for request in requests}
        self._alive = self._clock()
        self.core.submit(requests)

    def step(self) -> None:
        """Run one step and keep its deltas. Raises `StallError` if there was no token for `STALL_SECONDS`."""
        self._calls += 1
        tokens = self.core.counters().generated_tokens
        self.take(self.core.step())
        if self.core.counters().generated_tokens > tokens:
            self._alive = self._clock()
        elif self._clock() - self._alive > STALL_SECONDS:
            raise StallError(f"the engine gave no token for {STALL_SECONDS:g} s")

    def take(self, deltas: Sequence[Delta]) -> None:
        """Keep these deltas. Raises `HeadraceError` if one says that its request failed."""
        for delta in deltas:
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            self._deltas[delta.id].append(delta)
            if delta.finish is not None:
                self._open.remove(delta.id)

    def answer(self, request: Request, *, whole: bool = True) -> DrawnAnswer:
        """Return all tokens of a request so far. With `whole`, raise `HeadraceError` unless the answer is complete."""
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
        timings: Any = getattr(self.core, "timings", None)  # GPU runners fill these in.
        return self._calls if timings is None else int(timings.steps)
