"""How regular the engine benchmark's stream of swaps is, with a core and a publisher that only take their time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.bench.engine_swaps import SwapStream
from headrace.errors import DeliveryError

EVERY = 0.05
STREAM = 2
"""The first version of the stream: the one before it is installed before anything decodes."""
EARLY = 0.005
"""Clocks and timers may differ by so much."""


class Publisher:
    """Publishes at once, but for the first version of the stream."""

    def __init__(self, first_seconds: float) -> None:
        self._first_seconds = first_seconds
        self.closed = False

    def publish(self, version: int) -> Any:
        if version == STREAM:
            time.sleep(self._first_seconds)
        return SimpleNamespace(manifest=version)

    def acknowledged(self, version: int) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Core:
    """Stages and proves; the first of the stream takes longer. `installed` is when each of it was made live."""

    def __init__(self, first_stage_seconds: float, first_proof_seconds: float) -> None:
        self.version = 0
        self.timings = SimpleNamespace(longest_gap_seconds=0.0)
        self.installed: list[float] = []
        self._first_stage_seconds = first_stage_seconds
        self._first_proof_seconds = first_proof_seconds

    def counters(self) -> Any:
        return SimpleNamespace(prefilled_tokens=0)

    def stage(self, manifest: int) -> Any:
        if manifest == STREAM:
            time.sleep(self._first_stage_seconds)
        return SimpleNamespace(manifest=manifest, seconds=0.0)

    def swap(self, staged: Any) -> Any:
        assert not self.installed
        self.version = staged.manifest
        return self._proved()

    def install(self, staged: Any) -> None:
        assert staged.manifest == self.version + 1
        self.version = staged.manifest
        self.installed.append(time.perf_counter())

    def proof(self, *, wait: bool) -> Any:
        lasts = self._first_proof_seconds if len(self.installed) == 1 else 0.0
        if time.perf_counter() < self.installed[-1] + lasts:
            return None
        return self._proved()

    def _proved(self) -> Any:
        return SimpleNamespace(accepted=True, version=self.version, swap_seconds=0.0)


@pytest.mark.parametrize(
    ("publish", "stage", "proof"),
    [
        pytest.param(0.0, 0.0, 0.0, id="nothing is late"),
        pytest.param(1.8, 0.0, 0.0, id="the first is published late"),
        pytest.param(0.0, 0.8, 0.0, id="the first is staged slowly"),
        pytest.param(0.0, 2.5, 0.0, id="the first is staged for longer than an interval"),
        pytest.param(0.0, 0.5, 0.8, id="the first is proved late"),
    ],
)
def test_no_two_swaps_are_nearer_than_asked_for(publish: float, stage: float, proof: float) -> None:
    """How late the first is, in intervals: those after it do not make up for that."""
    core: Any = Core(stage * EVERY, proof * EVERY)
    publisher: Any = Publisher(publish * EVERY)
    stream = SwapStream(core, publisher, every=EVERY)
    deadline = time.perf_counter() + 30
    began = time.perf_counter()
    with stream:
        while len(stream.swaps) < 5 and time.perf_counter() < deadline:
            stream.tick()
            time.sleep(0.001)
    assert [swap.version for swap in stream.swaps] == [2, 3, 4, 5, 6]
    assert core.installed[0] >= began + EVERY - EARLY
    assert np.diff(core.installed).min() >= EVERY - EARLY
    assert np.diff([swap.at for swap in stream.swaps]).min() >= EVERY - EARLY


def test_a_first_version_that_is_not_accepted_ends_the_publisher() -> None:
    publisher: Any = Publisher(0.0)
    core: Any = Core(0.0, 0.0)
    core.swap = lambda staged: SimpleNamespace(accepted=False, version=1, reason="another digest")
    with (
        pytest.raises(DeliveryError, match="version 1 was not accepted: another digest"),
        SwapStream(core, publisher, every=EVERY),
    ):
        pytest.fail("entered")
    assert publisher.closed
