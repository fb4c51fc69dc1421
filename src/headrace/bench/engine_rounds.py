"""Rounds of requests to an `EngineCore`, timed from the submit to the last token. Prompts are included.

The same options always give the same requests. Every request must end with all of its tokens, or the benchmark fails. A
round with swaps gets new versions at a fixed interval, from a process that publishes, through the loop that drives an
engine in a run. Two sets of weights take turns. They differ so much that a token tagged with the wrong version is found
by its log-probability.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.bench.delivery_sides import Publish, PublisherProcess
from headrace.bench.options import EngineBench
from headrace.bench.workload import make_lengths
from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.base import Timings
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop
from headrace.errors import DeliveryError, HeadraceError, StallError
from headrace.types import join_routing

WARM_TOKENS = 64
"""The length of the longest answer in the warm-up round, in tokens; the others are scaled in proportion. It is so large
that no answer has ended when the last request of a full batch begins. Otherwise the warm-up would never reach the
largest batch, and its CUDA graph would be captured in the measured round."""
DEADLINE = 300.0
"""How long a delivery may take."""
_POLL_SECONDS = 0.005
STALL_SECONDS = 300.0
"""If no step gives a token for this long, the engine is stalled."""


def make_requests(options: EngineBench, vocabulary: int) -> list[Request]:
    """Return the requests of the round that is measured, each with a seed of its own."""
    draw = np.random.default_rng(options.seed)
    count, size = options.requests or options.batch, options.group_size
    prompts = draw.integers(0, vocabulary, (-(-count // size), options.prompt)).astype(np.int32)
    lengths = make_lengths(options.lengths or f"equal:{options.generate}", count, options.seed).tolist()
    rows, longest = options.pair("tail")
    lengths[count - rows :] = [longest] * rows
    return [
        Request(
            id=f"run/{number}",
            token_ids=prompts[number // size],
            group=f"run/group-{number // size}" if size > 1 else "",
            sampling=Sampling(
                max_tokens=length,
                temperature=options.temperature,
                top_p=options.top_p,
                top_k=options.top_k,
                seed=(options.seed << 32) + number,
            ),
        )
        for number, length in enumerate(lengths)
    ]


def lengths_of(requests: Sequence[Request]) -> list[int]:
    """Return the number of tokens that each request asks for."""
    return [request.sampling.max_tokens for request in requests]


def other_round(requests: Sequence[Request], roll: int, longest: int | None = None) -> list[Request]:
    """Return the same round with other prompts, so that no cache holds a prefix of them.

    With `longest`, answers are scaled so that none is longer. They end in the same order, so the round goes through the
    same batch sizes.
    """
    scale = min(1.0, longest / max(lengths_of(requests))) if longest else 1.0
    return [
        msgspec.structs.replace(
            request,
            id=f"{roll}/{request.id}",
            group=request.group and f"{roll}/{request.group}",
            token_ids=np.roll(request.token_ids, roll),
            sampling=msgspec.structs.replace(
                request.sampling,
                # At least two, so that every answer has a decode step.
                max_tokens=max(
                    min(2, longest or 2, request.sampling.max_tokens), round(request.sampling.max_tokens * scale)
                ),
            ),
        )
        for request in requests
    ]


class Progress(NamedTuple):
    """How far a round has come at one moment, or from one moment to another."""

    seconds: float
    steps: int
    tokens: int


@dataclass
class Round:
    """The measurements of one round of requests. The answers are in the order of the requests."""

    answers: list[Delta] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    decode_steps: int = 0
    """The number of steps that computed no prompt token."""
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    device_seconds: float = 0.0
    prefilled: int = 0
    preemptions: int = 0
    full_until: Progress | None = None
    """The moment from which no request waited for a slot any more."""
    tail_from: Progress | None = None
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
            mark = Progress(now - started, timings.steps, stats.generated_tokens - before.generated_tokens)
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
        """Submit these requests."""
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

    def answer(self, request: Request) -> Delta:
        """Return all tokens of a request. Raises `HeadraceError` if the answer is not complete."""
        deltas, wanted = self._deltas[request.id], request.sampling.max_tokens
        answer = Delta(
            id=request.id,
            token_ids=np.concatenate([delta.token_ids for delta in deltas]),
            logprobs=np.concatenate([delta.logprobs for delta in deltas]),
            versions=np.concatenate([delta.versions for delta in deltas]),
            routing=join_routing([(len(delta.token_ids), delta.routing) for delta in deltas]),
        )
        if not len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == wanted:
            raise HeadraceError(f"request {request.id} ended with {len(answer.token_ids)} of {wanted} tokens")
        return answer


def bench_fork(driver: Driver, like: Request, count: int, at: int, length: int) -> dict[str, Any]:
    """Fork a running sequence, the pivot, `count` times after its first `at` tokens. Each fork samples `length` tokens.

    Each fork must have exactly the tokens that a fresh request with the same prefix and seed gets.
    """
    core = driver.core
    # The pivot samples as many more tokens as its forks, so that all end together.
    sampling = msgspec.structs.replace(like.sampling, max_tokens=at - len(like.token_ids) + length)
    driver.submit([msgspec.structs.replace(like, id="pivot", sampling=sampling)])
    while len(core.sequences["pivot"].tokens) < at:
        driver.step()
    requests = core.fork("pivot", at, count)
    forked = driver.run(requests)
    core.scheduler.forget_prefixes()
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


def _difference(fork: Delta, fresh: Delta) -> float:
    """Return the largest difference of the log-probabilities, up to the first token that differs."""
    same = fork.token_ids == fresh.token_ids
    until = len(same) if same.all() else int(same.argmin())
    return float(np.abs(fork.logprobs[:until] - fresh.logprobs[:until]).max(initial=0.0))


class Swap(NamedTuple):
    """The measurements of one swap."""

    at: float
    """When the weights were staged, and so could be installed after the current step."""
    stall_seconds: float
    """How long decoding stood still. On a GPU: the longest gap between two launches of steps, from the beginning of
    staging until the weights were proved. The copy of the weights is part of that gap."""
    proof: Proof


def run_with_swaps(
    driver: Driver, requests: Sequence[Request], publisher: PublisherProcess, transport: str, every: float
) -> tuple[Round, list[Swap]]:
    """Serve these requests, and deliver a version every `every` seconds meanwhile. The core is closed afterwards.

    One version is installed before, because in a run too an engine has weights before it serves.
    """
    core, ended = driver.core, threading.Event()
    first = Publish(version=core.version + 1, transport=transport)
    _check(core.swap(core.stage(publisher.publish(first).manifest)))

    seconds = 0.0

    def emit(deltas: list[Delta]) -> None:
        nonlocal seconds
        driver.take(deltas)
        if not driver.open:
            # Taken here, because the end of the loop waits for a version that is being staged.
            seconds = time.perf_counter() - started
            ended.set()
            loop.stop()

    loop = EngineLoop(core, emit)
    core.timings.reset()
    started = time.perf_counter()
    driver.submit(requests)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="versions") as pool:

        def feed() -> list[Swap]:
            # A prompt that is partly computed would get keys and values of two versions.
            while any(not sequence.sampled for sequence in list(core.sequences.values())):
                ended.wait(_POLL_SECONDS)
            return stream_versions(loop, core.timings, publisher, first, every, ended)

        fed = pool.submit(feed)
        try:
            loop.run()
        finally:
            ended.set()
        swaps = fed.result(DEADLINE)
    answers = [driver.answer(request) for request in requests]
    return Round(answers=answers, seconds=seconds, steps=core.timings.steps), swaps


def stream_versions(
    loop: EngineLoop,
    timings: Timings,
    publisher: PublisherProcess,
    last: Publish,
    every: float,
    ended: threading.Event,
) -> list[Swap]:
    """Deliver the versions after `last` until the round has `ended`, and return the swaps.

    Staging begins `every` seconds after the last version was staged. So if a version is late, all later ones are too.
    """
    swaps: list[Swap] = []
    due = time.perf_counter() + every
    while True:
        # In a run too, the trainer makes the next version while the engine serves this one.
        last = msgspec.structs.replace(last, version=last.version + 1)
        manifest = publisher.publish(last).manifest
        if ended.wait(max(0.0, due - time.perf_counter())):
            return swaps
        began = time.perf_counter()
        timings.longest_gap_seconds = 0.0
        try:
            proof = loop.load(manifest).result(DEADLINE)
            _check(proof)
        except (TimeoutError, DeliveryError):
            loop.stop()
            raise
        except HeadraceError:
            return swaps  # The round ended meanwhile, and the loop with it.
        # Without a GPU there is no gap between launches: decoding waits for the whole installation.
        staged_at = began + proof.stage_seconds
        swaps.append(Swap(staged_at, timings.longest_gap_seconds or proof.swap_seconds, proof))
        due = staged_at + every


def _check(proof: Proof) -> None:
    if not proof.accepted:
        raise DeliveryError(f"version {proof.version} was not accepted: {proof.reason}")


def swap_figures(swaps: list[Swap], run: Round, plain: Round, *, copy_seconds: float) -> dict[str, Any]:
    """Return the figures of a round with swaps, compared with the round `plain` without.

    `copy_seconds` is the time of a copy of all weights at the bandwidth of the device.
    """
    stalls = [swap.stall_seconds for swap in swaps]
    # A swap may take as long as its copy at 70% of the bandwidth, and the step that it waits for.
    limit = copy_seconds / 0.7 + plain.seconds / plain.steps
    rate, plain_rate = run.tokens / run.seconds, plain.tokens / plain.seconds
    return {
        "swaps": len(swaps),
        "interval_seconds": (swaps[-1].at - swaps[0].at) / (len(swaps) - 1) if len(swaps) > 1 else None,
        "stall_seconds": stalls,
        "stall_seconds_mean": float(np.mean(stalls)) if stalls else None,
        "stall_seconds_max": max(stalls, default=None),
        "stage_seconds_mean": float(np.mean([swap.proof.stage_seconds for swap in swaps])) if swaps else None,
        "copy_seconds": copy_seconds,
        "stall_limit_seconds": limit,
        "stall_over_limit": max(stalls) / limit if stalls else None,
        "tokens_per_second_without": plain_rate,
        "tokens_per_second_with": rate,
        "loss": 1 - rate / plain_rate,
    }
