"""A clock that jumps: hours take no time, events keep their order, and a wait for nothing is an error."""

from __future__ import annotations

import asyncio
import importlib
import time
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.sim.run import run_virtual

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_hours_pass_in_order_and_at_once() -> None:
    async def main() -> tuple[list[str], float]:
        loop, seen = asyncio.get_running_loop(), []

        async def say(word: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(f"{word} {loop.time():g}")

        await asyncio.gather(say("third", 7200), say("first", 0.5), say("second", 3600))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.Event().wait()
        return seen, loop.time()

    started = time.monotonic()
    assert run_virtual(main()) == (["first 0.5", "second 3600", "third 7200"], 7300.0)
    assert time.monotonic() - started < 5


def test_a_wait_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(HeadraceError, match="this would take for ever"):
        run_virtual(main())


def test_the_window_trains_what_was_generated_and_a_queue_that_drops_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    study = importlib.import_module("long_tail").study
    window, queue, synchronous = (study(policy, 320) for policy in ("depth 2", "drop oldest", "depth 0"))
    assert window.distance == 0.0 and window.dropped_groups == 0
    assert sorted(window.trained) == sorted(window.generated) == sorted(synchronous.generated)
    assert queue.distance > 0.05 and queue.trained.mean() < 0.75 * queue.generated.mean()
    assert window.tokens_per_second > 1.6 * synchronous.tokens_per_second
    assert synchronous.largest_lag == 0 < window.largest_lag <= 5
    again = study("depth 2", 320)
    assert (again.tokens_per_second, again.trained.tolist()) == (window.tokens_per_second, window.trained.tolist())
