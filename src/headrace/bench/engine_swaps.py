"""Delivers new versions to a decoding engine at a fixed interval, and measures how long decoding stops for each.

Versions are published in a process of their own, and staged, swapped in between two steps and proved by the loop that
drives an engine in a run. Two sets of weights take turns. They differ so much that a token tagged with the wrong
version is found by its log-probability.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.bench.delivery_sides import Publish, PublisherProcess
from headrace.bench.engine_rounds import Driver, Round
from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Request
from headrace.engines.embedded.base import Timings
from headrace.engines.embedded.loop import EngineLoop
from headrace.errors import DeliveryError, HeadraceError

DEADLINE = 300.0
_POLL_SECONDS = 0.005


class Swap(NamedTuple):
    """The measurements of one swap."""

    at: float
    """When staging began."""
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

    def emit(deltas: list[Delta]) -> None:
        driver.take(deltas)
        if not driver.open:
            ended.set()
            loop.stop()

    loop = EngineLoop(core, emit)
    core.timings.reset()
    driver.submit(requests)
    started = time.perf_counter()
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
        seconds = time.perf_counter() - started
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

    A delivery begins `every` seconds after the last one was proved. So if a version is late, all later ones are too.
    """
    swaps: list[Swap] = []
    due = time.perf_counter() + every
    while True:
        # In a run too, the trainer makes the next version while the engine serves this one.
        last = msgspec.structs.replace(last, version=last.version + 1)
        manifest = publisher.publish(last).manifest
        if ended.wait(max(0.0, due - time.perf_counter())):
            return swaps
        at = time.perf_counter()
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
        swaps.append(Swap(at, timings.longest_gap_seconds or proof.swap_seconds, proof))
        due = time.perf_counter() + every


def _check(proof: Proof) -> None:
    if not proof.accepted:
        raise DeliveryError(f"version {proof.version} was not accepted: {proof.reason}")


def swap_figures(swaps: list[Swap], run: Round, plain: Round, *, copy_seconds: float) -> dict[str, Any]:
    """Return the figures of a round with swaps, compared with a round without.

    `plain_rate` and `step_seconds` are those of the round without swaps. `copy_seconds` is the time of a copy of all
    weights at the bandwidth of the device.
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
