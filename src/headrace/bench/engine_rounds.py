"""Rounds of requests to an `EngineCore`, timed from the submit to the last token. Prompts are included.

The same options always give the same requests. Every request must end with all of its tokens. If one does not, the
benchmark fails instead of showing a lower figure.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.bench.options import EngineBench, parse_pair
from headrace.bench.workload import make_lengths
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.errors import HeadraceError, StallError
from headrace.types import Float32Array, Int32Array

WARM_TOKENS = 64
"""The length of the longest answer in the warm-up round, in tokens; the others are scaled in proportion. It is so large
that no answer has ended when the last request of a full batch begins. Otherwise the warm-up would never reach the
largest batch, and its CUDA graph would be captured in the measured round."""
STALL_SECONDS = 300.0
"""If no step gives a token for this long, the engine is stalled."""


@dataclass(frozen=True)
class Work:
    """The requests of one round. Request i has the prompt `prompts[i]` and an answer of `lengths[i]` tokens."""

    prompts: list[Int32Array]
    lengths: list[int]
    tail_rows: int = 0
    """The number of requests in the tail: the last ones, which still run when all others have ended."""
    fork: tuple[int, int] | None = None
    """The number of forks, and the number of tokens before them; None if nothing is forked."""
    group_size: int = 1
    """The number of successive requests with the same prompt."""
    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1))

    @property
    def tokens(self) -> int:
        """The number of tokens to generate, over all requests."""
        return sum(self.lengths)

    def requests(self, name: str) -> list[Request]:
        """Return the requests of the round, each with a seed of its own."""
        return [
            self.request(f"{name}/{i}", prompt, length, seed=i, group=self._group(name, i))
            for i, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True))
        ]

    def request(self, name: str, prompt: Int32Array, length: int, *, seed: int, group: str = "") -> Request:
        """Return one request with the sampling settings of this work."""
        sampling = msgspec.structs.replace(self.sampling, max_tokens=length, seed=self.sampling.seed + seed)
        return Request(id=name, token_ids=prompt, sampling=sampling, group=group)

    def _group(self, name: str, number: int) -> str:
        return f"{name}/group-{number // self.group_size}" if self.group_size > 1 else ""

    def warm_up(self) -> Work:
        """Return a short round that goes through the same batch sizes, because its answers end in the same order."""
        longest = max(self.lengths)
        scaled = [
            max(2, round(length * WARM_TOKENS / longest)) if longest > WARM_TOKENS else length
            for length in self.lengths
        ]
        return dataclasses.replace(self.rolled(1), lengths=scaled, tail_rows=0, fork=None)

    def rolled(self, by: int) -> Work:
        """Return the same round with other prompts, so that no cache holds a prefix of them."""
        return dataclasses.replace(self, prompts=[np.roll(prompt, by) for prompt in self.prompts])


def make_work(options: EngineBench, vocabulary: int) -> Work:
    """Return the round that is measured."""
    draw = np.random.default_rng(options.seed)
    count = options.requests or options.batch
    groups = draw.integers(0, vocabulary, (-(-count // options.group_size), options.prompt)).astype(np.int32)
    prompts = list(np.repeat(groups, options.group_size, axis=0)[:count])
    lengths = make_lengths(options.lengths or f"equal:{options.generate}", count, options.seed).tolist()
    rows = 0
    if options.tail:
        rows, longest = parse_pair("--tail", "ROWS:LENGTH", options.tail)
        lengths[count - rows :] = [longest] * rows
    return Work(
        prompts=prompts,
        lengths=lengths,
        tail_rows=rows,
        fork=parse_pair("--fork", "N:AT", options.fork) if options.fork else None,
        group_size=options.group_size,
        sampling=Sampling(
            max_tokens=1,
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            seed=options.seed << 32,
        ),
    )


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
    host_seconds: float = 0.0
    device_seconds: float = 0.0
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

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.open: set[str] = set()
        """The ids of the requests that have not ended."""
        self._deltas: dict[str, list[Delta]] = {}
        self._alive = 0.0

    def run(self, requests: Sequence[Request], *, tail_rows: int = 0) -> Round:
        """Submit all requests, and run steps until every request has ended.

        The tail begins when at most `tail_rows` requests are left.
        """
        timings = self.core.timings
        timings.reset()
        before = stats = self.core.counters()
        run = Round()
        started = now = time.perf_counter()
        self.submit(requests)
        while self.open:
            steps, then, prefilled = timings.steps, now, stats.prefilled_tokens
            self.step()
            now, stats = time.perf_counter(), self.core.counters()
            if stats.prefilled_tokens == prefilled:
                run.decode_steps += timings.steps - steps
                run.decode_seconds += now - then
            mark = ProgressMark(now - started, timings.steps, stats.generated_tokens - before.generated_tokens)
            if run.full_until is None and not stats.waiting:
                run.full_until = mark
            if tail_rows and run.tail_from is None and len(self.open) <= tail_rows:
                run.tail_from = mark
        run.seconds, run.steps = now - started, timings.steps
        run.prefilled = stats.prefilled_tokens - before.prefilled_tokens
        run.preemptions = stats.preemptions - before.preemptions
        run.host_seconds, run.device_seconds = timings.host_seconds, timings.device_seconds
        run.answers = [self.answer(request) for request in requests]
        return run

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit these requests to the engine."""
        self.open.update(request.id for request in requests)
        self._deltas |= {request.id: [] for request in requests}
        self._alive = time.perf_counter()
        self.core.submit(requests)

    def step(self) -> None:
        """Run one step and keep its deltas. Raises `StallError` if there was no token for `STALL_SECONDS`."""
        tokens = self.core.counters().generated_tokens
        self.take(self.core.step())
        if self.core.counters().generated_tokens > tokens:
            self._alive = time.perf_counter()
        elif time.perf_counter() - self._alive > STALL_SECONDS:
            raise StallError(f"the engine gave no token for {STALL_SECONDS:g} s")

    def take(self, deltas: Sequence[Delta]) -> None:
        """Keep these deltas. Raises `HeadraceError` if one says that its request failed."""
        for delta in deltas:
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            self._deltas[delta.id].append(delta)
            if delta.finish is not None:
                self.open.remove(delta.id)

    def answer(self, request: Request) -> DrawnAnswer:
        """Return all tokens of a request. Raises `HeadraceError` if the answer is not complete."""
        deltas, wanted = self._deltas[request.id], request.sampling.max_tokens
        answer = DrawnAnswer(
            np.concatenate([delta.token_ids for delta in deltas]),
            np.concatenate([delta.logprobs for delta in deltas]),
            np.concatenate([delta.versions for delta in deltas]),
        )
        if not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == wanted:
            raise HeadraceError(f"request {request.id} ended with {len(answer.token_ids)} of {wanted} tokens")
        return answer


def bench_fork(driver: Driver, work: Work, count: int, at: int, length: int) -> dict[str, Any]:
    """Fork a running sequence `count` times after its first `at` tokens. Each fork samples `length` tokens.

    The running sequence is called the pivot. Each fork must have exactly the tokens that a fresh request with the same
    prefix and seed gets.
    """
    core, prompt = driver.core, work.prompts[0]
    # The pivot samples as many more tokens as its forks, so that all end together.
    driver.submit([work.request("pivot", prompt, at - len(prompt) + length, seed=0)])
    while len(core.sequences["pivot"].tokens) < at:
        driver.step()
    requests = core.fork("pivot", at, count)
    forked = driver.run(requests)
    core.forget_prefixes()
    fresh = driver.run(
        [msgspec.structs.replace(request, id=f"fresh/{request.id}", parent="", group="") for request in requests]
    )
    pairs = list(zip(forked.answers, fresh.answers, strict=True))
    return {
        "continuations": count,
        "at": at,
        "tokens_each": length,
        "prefilled_tokens": forked.prefilled,
        "fresh_prefilled_tokens": fresh.prefilled,
        "seconds": forked.seconds,
        "fresh_seconds": fresh.seconds,
        "equal": sum(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs),
        "max_logprob_difference": max(_difference(a, b) for a, b in pairs),
    }


def _difference(fork: DrawnAnswer, fresh: DrawnAnswer) -> float:
    """Return the largest difference of the log-probabilities, up to the first token that differs."""
    same = fork.token_ids == fresh.token_ids
    until = len(same) if same.all() else int(same.argmin())
    return float(np.abs(fork.logprobs[:until] - fresh.logprobs[:until]).max(initial=0.0))
