"""The wire: messages keep what they hold, requests have deadlines, and a death is noticed."""

import asyncio
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.channel.codec import Message, decode, encode
from headrace.channel.heartbeats import Heartbeat, Hello, Stop
from headrace.channel.hub import Hub
from headrace.channel.worker_link import WorkerLink
from headrace.errors import ChannelError, DeadlineError, PeerDied
from headrace.types import Trace


class Echo(Message):
    text: str
    traces: list[Trace] = []


class Slow(Message):
    seconds: float


class Answer(Message):
    text: str
    total: int = 0


@given(
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=1, min_side=0, max_side=50)),
    st.text(),
)
def test_messages_survive_the_wire(tokens: np.ndarray, text: str) -> None:
    message = Echo(text=text, traces=[Trace.of_context(tokens), Trace.of_context(tokens[::-1])])
    again = decode(Echo, encode(message))
    assert again.text == text
    for sent, received in zip(message.traces, again.traces, strict=True):
        for field in ("token_ids", "trained", "logprobs", "versions"):
            a, b = getattr(sent, field), getattr(received, field)
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_arrays_are_not_copied() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    frames = encode(Echo(text="", traces=[Trace.of_context(tokens)]))
    held = np.frombuffer(frames[1], np.int32)
    assert np.shares_memory(held, tokens)
    assert np.shares_memory(decode(Echo, frames).traces[0].token_ids, tokens)


def test_what_is_not_a_message_is_refused() -> None:
    with pytest.raises(ChannelError, match="Echo message could not be decoded"):
        decode(Echo, [b"\x93\x01\x02\x03"])
    with pytest.raises(ChannelError, match="cannot send"):
        encode(Echo(text="", traces=[object()]))  # type: ignore[list-item]


def _worker(address: str) -> None:
    link = WorkerLink("worker-0", address, Path())
    link.phase = "busy"
    link.start()
    while True:
        incoming = link.next_message()
        if incoming is None:
            continue
        match incoming.message:
            case Echo(text="raise"):
                link.fail(incoming, "told to")
            case Echo(text=text, traces=traces):
                total = sum(int(trace.token_ids.sum()) for trace in traces)
                link.reply(incoming, Answer(text=text, total=total))
            case Slow(seconds=seconds):
                time.sleep(seconds)
            case Stop():
                link.close()
                return


@pytest.fixture
async def connected(tmp_path: Path):
    seen: list[Message] = []
    greeted = asyncio.Event()

    def on_message(peer: str, message: Message) -> None:
        seen.append(message)
        if isinstance(message, Hello):
            greeted.set()

    hub = Hub(f"ipc://{tmp_path}/hub", on_message)
    hub.start()
    process = multiprocessing.get_context("spawn").Process(target=_worker, args=(hub.address,), daemon=True)
    process.start()
    async with asyncio.timeout(60):
        await greeted.wait()
    yield hub, process, seen
    process.kill()
    process.join(60)
    await hub.close()


async def test_requests_are_answered_and_beats_arrive_while_busy(connected) -> None:
    hub, _, seen = connected
    trace = Trace.of_context(np.arange(10, dtype=np.int32))
    answers = await asyncio.gather(
        *(hub.request("worker-0", Echo(text=str(i), traces=[trace] * i), Answer, timeout=60) for i in range(20))
    )
    assert [(answer.text, answer.total) for answer in answers] == [(str(i), 45 * i) for i in range(20)]
    with pytest.raises(ChannelError, match="worker-0: told to"):
        await hub.request("worker-0", Echo(text="raise"), Answer, timeout=60)
    await hub.send("worker-0", Slow(seconds=2.0))
    before = sum(isinstance(message, Heartbeat) for message in seen)
    await asyncio.sleep(1.8)
    assert sum(isinstance(message, Heartbeat) for message in seen) >= before + 2


async def test_a_request_has_a_deadline_and_names_who_was_late(connected) -> None:
    hub, _, _ = connected
    with pytest.raises(DeadlineError, match=r"worker-0 did not answer Slow within 0.3 s"):
        await hub.request("worker-0", Slow(seconds=1.0), Answer, timeout=0.3)
    answer = await hub.request("worker-0", Echo(text="still here"), Answer, timeout=60)
    assert answer.text == "still here"


async def test_a_death_fails_what_waits_for_it(connected) -> None:
    hub, process, _ = connected
    waiting = asyncio.create_task(hub.request("worker-0", Slow(seconds=60), Answer, timeout=60))
    await asyncio.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    hub.mark_dead(PeerDied("worker-0", "killed by signal 9", "last words"))
    with pytest.raises(PeerDied, match="killed by signal 9"):
        await waiting
    with pytest.raises(PeerDied):
        await hub.request("worker-0", Echo(text=""), Answer, timeout=60)
    assert hub.peers == []


async def test_silence_is_taken_for_death(connected, monkeypatch) -> None:
    hub, process, _ = connected
    monkeypatch.setattr("headrace.channel.hub.SILENCE_SECONDS", 1.5)
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(PeerDied, match="silent for"):
        await hub.request("worker-0", Echo(text=""), Answer, timeout=60)
