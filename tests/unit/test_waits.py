"""The book of waits: conditions are looked at when somebody rings, and a stall names who waits for what."""

import asyncio

import pytest

from headrace.errors import StallError
from headrace.pipeline.waits import Waits, scorer_waits


async def test_a_wait_ends_when_its_condition_holds() -> None:
    waits, ready = Waits(), []
    waiting = asyncio.create_task(waits.until("train", lambda: "a batch", lambda: bool(ready)))
    await asyncio.sleep(0)
    waits.ring()
    await asyncio.sleep(0)
    assert not waiting.done()
    assert "train waits for a batch" in str(waits.entries()[0])
    ready.append(1)
    waits.ring()
    async with asyncio.timeout(0.5):
        await waiting
    assert waits.entries() == []


async def test_a_condition_that_changes_silently_is_seen_within_a_second() -> None:
    waits, ready = Waits(), []
    waiting = asyncio.create_task(waits.until("admit", lambda: "a slot", lambda: bool(ready)))
    await asyncio.sleep(0.01)
    ready.append(1)
    async with asyncio.timeout(3):
        await waiting


async def test_a_stall_is_reported_with_every_wait_oldest_first() -> None:
    now = [0.0]
    waits = Waits(clock=lambda: now[0])
    first = asyncio.create_task(waits.until("train", lambda: "4 more groups", lambda: False))
    await asyncio.sleep(0)
    now[0] = 5.0
    second = asyncio.create_task(waits.until("deliver", lambda: "version 3", lambda: False))
    await asyncio.sleep(0)
    now[0] = 30.0
    waits.check(limit=60)
    now[0] = 61.0
    with pytest.raises(StallError) as caught:
        waits.check(limit=60)
    assert str(caught.value) == (
        "no progress for 61 s: train waits for 4 more groups, since 61 s; deliver waits for version 3, since 56 s"
    )
    asked = scorer_waits({"the scorer 'slow'": (2, 40.0), "the teacher 'big'": (1, 3.0)})
    with pytest.raises(StallError) as caught:
        waits.check(60, asked)
    assert str(caught.value).endswith(
        "since 56 s; 2 questions wait for an answer of the scorer 'slow', since 40 s; "
        "1 question waits for an answer of the teacher 'big', since 3 s"
    )
    waits.moved()
    waits.check(60, asked)
    for task in (first, second):
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
