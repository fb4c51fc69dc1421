"""How regular the engine benchmark's stream of versions is, with a loop and a publisher that only take their time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.bench.delivery_sides import Publish
from headrace.bench.engine_rounds import stream_versions
from headrace.errors import DeliveryError, HeadraceError

EVERY = 0.05
EARLY = 0.005
"""A wait may end before its time by so much."""


class Publisher:
    """Publishes at once, but for the first version."""

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds

    def publish(self, order: Publish) -> Any:
        if order.version == 1:
            time.sleep(self._first_seconds)
        return SimpleNamespace(manifest=order.version)


class Loop:
    """Loads versions; the first is staged for longer.

    `asked` is when each was asked for, and `staging` how long staging took: a busy machine may take longer.
    """

    def __init__(self, first_seconds: float, versions: int = 5, *, accepted: bool = True) -> None:
        self.asked: list[float] = []
        self.staging: list[float] = []
        self.ended = threading.Event()
        self.stopped = False
        self._first_seconds = first_seconds
        self._versions = versions
        self._accepted = accepted

    def load(self, manifest: int) -> Future[Any]:
        future: Future[Any] = Future()
        if len(self.asked) == self._versions:
            self.ended.set()
            future.set_exception(HeadraceError("the engine has stopped"))
            return future
        self.asked.append(time.perf_counter())
        if manifest == 1:
            time.sleep(self._first_seconds)
        self.staging.append(time.perf_counter() - self.asked[-1])
        seconds = {"stage_seconds": self.staging[-1], "swap_seconds": 0.25}
        proof = SimpleNamespace(accepted=self._accepted, version=manifest, reason="another digest", **seconds)
        future.set_result(proof)
        return future

    def stop(self) -> None:
        self.stopped = True


def stream(loop: Loop, publisher: Publisher) -> Any:
    timings: Any = SimpleNamespace(longest_gap_seconds=0.0)
    given: Any = (loop, timings, publisher)
    return stream_versions(*given, Publish(version=0, transport="shm"), EVERY, loop.ended)


@pytest.mark.parametrize(
    ("publish", "load"),
    [
        pytest.param(0.0, 0.0, id="nothing is late"),
        pytest.param(1.8, 0.0, id="the first is published late"),
        pytest.param(0.0, 0.8, id="the first is loaded slowly"),
        pytest.param(0.0, 2.5, id="the first is loaded for longer than an interval"),
    ],
)
def test_no_two_versions_are_nearer_than_asked_for(publish: float, load: float) -> None:
    """How late the first is, in intervals: those after it do not make up for that."""
    loop, began = Loop(load * EVERY), time.perf_counter()
    swaps = stream(loop, Publisher(publish * EVERY))
    assert [swap.proof.version for swap in swaps] == [1, 2, 3, 4, 5], "the sixth ended with the round"
    assert [swap.stall_seconds for swap in swaps] == [0.25] * 5
    starts = np.array([swap.at for swap in swaps]) - loop.staging
    earliest = np.array([began + EVERY, *(swap.at + EVERY for swap in swaps[:-1])])
    assert (starts >= earliest - EARLY).all() and (starts <= loop.asked).all()


def test_a_version_that_is_not_accepted_ends_the_round() -> None:
    loop = Loop(0.0, accepted=False)
    with pytest.raises(DeliveryError, match="version 1 was not accepted: another digest"):
        stream(loop, Publisher(0.0))
    assert loop.stopped
