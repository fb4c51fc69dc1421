"""One queue of events: in order, and never a wait without an end."""

from __future__ import annotations

import asyncio

import pytest

from headrace.channel import events as module
from headrace.channel.events import Events, Returned


async def test_events_come_in_the_order_in_which_they_were_put() -> None:
    events = Events()
    for name in "abc":
        events.put(Returned(name))
    assert [event.peer for event in await events.take() if isinstance(event, Returned)] == ["a", "b", "c"]


async def test_take_waits_for_the_next_event() -> None:
    events = Events()
    taking = asyncio.create_task(events.take())
    await asyncio.sleep(0)
    assert not taking.done()
    events.put(Returned("a"))
    assert await asyncio.wait_for(taking, 60) == [Returned("a")]


async def test_take_returns_after_a_while_even_if_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    assert await asyncio.wait_for(Events().take(), 60) == []


async def test_what_is_cleared_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    events = Events()
    events.put(Returned("a"))
    events.clear()
    assert await events.take() == []
