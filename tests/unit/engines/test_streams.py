"""Requests leave an event loop together, and each gets its own deltas up to exactly one last."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.engines.base import Delta, FinishReason, Request, Sampling
from headrace.engines.streams import StreamedEngine
from headrace.errors import DeadlineError


class Elsewhere(StreamedEngine):
    """An engine that notes what reaches it, in order, and leaves the answers to the test."""

    def __init__(self, deadline: float | None = 5.0) -> None:
        super().__init__("e", deadline=deadline)
        self.seen: list[list[str] | str] = []

    def _submit(self, requests: list[Request]) -> None:
        self.seen.append([request.id for request in requests])

    def _withdraw(self, request_id: str) -> None:
        self.seen.append(request_id)

    def start(self, *ids: str) -> list[asyncio.Task[list[Delta]]]:
        return [asyncio.create_task(self._read(request_id)) for request_id in ids]

    async def _read(self, request_id: str) -> list[Delta]:
        return [delta async for delta in self.generate(ask(request_id))]


def ask(request_id: str) -> Request:
    return Request(id=request_id, token_ids=np.array([1], np.int32), sampling=Sampling(max_tokens=9))


def delta(request_id: str, token: int, finish: FinishReason | None = None) -> Delta:
    ints = np.array([token], np.int32)
    return Delta(id=request_id, token_ids=ints, logprobs=ints.astype(np.float32), versions=ints, finish=finish)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_requests_of_one_turn_leave_together_and_get_their_own_deltas() -> None:
    there = Elsewhere()
    tasks = there.start("a", "b", "c")
    await turns()
    tasks += there.start("d")
    await turns()
    assert there.seen == [["a", "b", "c"], ["d"]]
    there.deliver([delta("b", 1), delta("a", 2, "stop"), delta("nobody", 3), delta("b", 4, "length")])
    there.deliver([delta(request_id, 5, "stop") for request_id in "abcd"])
    tokens = [[int(d.token_ids[0]) for d in await task] for task in tasks]
    assert tokens == [[2], [1, 4], [5], [5]]
    assert len(there.seen) == 2, "a request that ended is not withdrawn"


async def test_an_open_id_fails_alone_and_may_be_used_again_later() -> None:
    there = Elsewhere()
    first, second = there.start("a", "a")
    (only,) = await second
    assert only.finish == "failed" and "'a' is already running" in only.error
    there.deliver([delta("a", 1, "stop")])
    assert [d.finish for d in await first] == ["stop"]
    (third,) = there.start("a")
    await turns()
    there.deliver([delta("a", 2, "stop")])
    assert [d.finish for d in await third] == ["stop"]
    assert there.seen == [["a"], ["a"]]


async def test_a_request_given_up_is_withdrawn_and_never_leaves_afterwards() -> None:
    there = Elsewhere()
    gone, left = there.start("gone", "left")
    await turns()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert there.seen == [["gone", "left"], "gone"]

    there.seen.clear()
    early = anext(there.generate(ask("early")))
    early.send(None)  # it is posted
    with pytest.raises(asyncio.CancelledError):
        early.throw(asyncio.CancelledError)  # and given up in the same turn
    await turns()
    assert there.seen == ["early"]
    left.cancel()


async def test_flush_submits_before_the_turn_ends_and_only_once() -> None:
    there = Elsewhere()
    tasks = there.start("a")
    await asyncio.sleep(0)
    there.flush()
    assert there.seen == [["a"]]
    await turns()
    assert there.seen == [["a"]]
    there.lost("over")
    await asyncio.gather(*tasks)


async def test_a_lost_engine_fails_what_is_open_and_what_comes_and_is_sent_nothing() -> None:
    there = Elsewhere(deadline=None)
    ended, running = there.start("ended", "running")
    await turns()
    there.deliver([delta("ended", 1, "stop"), delta("running", 1)])
    (unsent,) = there.start("unsent")
    await asyncio.sleep(0)
    there.lost("e died of thirst")
    (late,) = there.start("late")
    async with asyncio.timeout(5):
        assert [d.finish for d in await ended] == ["stop"]
        assert [d.finish for d in await running] == [None, "failed"]
        for task in (unsent, late):
            assert [(d.finish, d.error) for d in await task] == [("failed", "e died of thirst")]
    await turns()
    assert there.seen == [["ended", "running"]]


async def test_leaving_a_lost_engine_withdraws_nothing() -> None:
    there = Elsewhere()
    deltas = there.generate(ask("a"))
    reading = asyncio.ensure_future(anext(deltas))
    await turns()
    there.deliver([delta("a", 1)])
    assert (await reading).finish is None
    there.lost("e is gone")
    await deltas.aclose()  # type: ignore[attr-defined]
    assert there.seen == [["a"]]


async def test_silence_is_an_error_after_the_deadline_and_withdraws_the_request() -> None:
    there = Elsewhere(deadline=0.05)
    (task,) = there.start("a")
    with pytest.raises(DeadlineError, match=r"e sent nothing for a request in 0\.05 s"):
        await task
    assert there.seen == [["a"], "a"]
