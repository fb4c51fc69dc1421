"""Messages that cannot be read or sent: the hub and everybody else go on, and the sender is named."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from headrace.channel.codec import PROTOCOL, Message, encode, pack
from headrace.channel.events import Died, Dropped, Events
from headrace.channel.heartbeats import Hello, Ready
from headrace.channel.hub import BAD_MESSAGES, Hub
from headrace.channel.vital import EXIT_LOST
from headrace.channel.worker_link import WorkerLink
from headrace.cluster import supervision
from headrace.cluster.launchers.base import Exit, WorkerSpec
from headrace.cluster.placement import Place
from headrace.cluster.supervision import Fleet
from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Request, Sampling, failed_delta
from headrace.engines.pool import EnginePool
from headrace.engines.serving import Deltas, RemoteEngine, Submit, send_deltas
from headrace.errors import ChannelError
from waiting import until

WORKER = "worker-0"
GARBAGE = [
    pytest.param([b"\xc1"], id="header"),
    pytest.param([], id="nothing"),
    pytest.param([*pack("event", 0, Hello())[:1], b"\xff\xff"], id="body"),
    pytest.param([b"\x93\xa5event\x00\xa4Nope", b"\x80"], id="class"),
    pytest.param([b"\x93\xa5event\x00\xa2\xff\xfe", b"\x80"], id="no UTF-8"),
]


class Question(Message):
    text: str = ""


class Wire:
    """A hub, and a socket that says what the test wants."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.heard: list[tuple[str, Message]] = []
        self.dropped: list[tuple[str, str, bool]] = []
        self.hub = Hub(
            f"ipc://{directory}/hub",
            lambda peer, message: self.heard.append((peer, message)),
            on_dropped=lambda *dropped: self.dropped.append(dropped),
            **options,  # type: ignore[arg-type]
        )
        self.hub.start()
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def socket(self, name: bytes = WORKER.encode()) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.hub.address)
        self.sockets.append(socket)
        return socket


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    wire = Wire(tmp_path, names={WORKER}, limit=10_000)
    yield wire
    wire.context.destroy(linger=0)
    await wire.hub.close()


@pytest.mark.parametrize("frames", GARBAGE)
async def test_friction_33_a_message_that_cannot_be_read_is_dropped_and_the_hub_goes_on(
    wire: Wire, frames: list[bytes]
) -> None:
    socket = wire.socket()
    socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
    socket.send_multipart(frames or [b""])
    socket.send_multipart(pack("event", 0, Ready()))
    await until(lambda: len(wire.heard) == 2)
    assert [type(message) for _, message in wire.heard] == [Hello, Ready]
    ((peer, _, refused),) = wire.dropped
    assert peer == WORKER and not refused
    assert wire.hub.dropped == {WORKER: 1}


async def test_friction_33_a_message_over_the_limit_is_dropped(wire: Wire) -> None:
    socket = wire.socket()
    socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
    socket.send_multipart([*pack("event", 0, Ready()), bytes(10_000)])
    socket.send_multipart(pack("event", 0, Ready()))
    await until(lambda: len(wire.heard) == 2)
    ((_, reason, _),) = wire.dropped
    assert reason.endswith("bytes is over the limit of 10,000")


async def test_friction_33_an_answer_that_cannot_be_read_fails_its_request_at_once(wire: Wire) -> None:
    socket = wire.socket()
    socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
    await until(lambda: wire.heard)
    asking = asyncio.create_task(wire.hub.request(WORKER, Question(), Question, timeout=600))
    await until(lambda: socket.poll(0))
    header, _ = socket.recv_multipart()
    socket.send_multipart([header.replace(b"\xa7request", b"\xa5reply"), b"\x91"])
    with pytest.raises(ChannelError, match="worker-0: a Question message could not be decoded"):
        async with asyncio.timeout(30):
            await asking


async def test_friction_33_a_stranger_is_not_listened_to(wire: Wire) -> None:
    stranger = wire.socket(b"\xff\x1b[2J")
    for _ in range(2 * BAD_MESSAGES):
        stranger.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
    await until(lambda: wire.hub.dropped[""] == 2 * BAD_MESSAGES)
    assert wire.heard == [] and wire.hub.peers == []
    assert len(wire.dropped) == BAD_MESSAGES, "the same line is not said for ever"
    peer, reason, refused = wire.dropped[0]
    assert peer == "a stranger" and not refused and "\x1b" not in reason


async def test_a_task_of_the_hub_that_fails_is_reported(tmp_path: Path) -> None:
    def raises(peer: str, message: Message) -> None:
        raise RuntimeError("a bug")

    hub = Hub(f"ipc://{tmp_path}/hub", raises)
    hub.start()
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(hub.address)
        socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(30):
                await hub.failed()
    finally:
        context.destroy(linger=0)
        await hub.close()


class Played:
    """A launcher of one worker, whose messages the test sends itself."""

    def __init__(self) -> None:
        self.killed: list[str] = []
        self.starts = 0
        self.exits: asyncio.Queue[Exit] = asyncio.Queue()

    async def start(self, spec: WorkerSpec) -> None:
        self.starts += 1

    async def next_exit(self) -> Exit:
        return await self.exits.get()

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self.exits.put_nowait(Exit(name=name, code=-9, last_lines=""))

    async def stop(self, grace: float) -> None:
        pass


async def test_friction_33_a_worker_whose_messages_cannot_be_read_is_started_again_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE", 0.01)
    launcher, events = Played(), Events()
    fleet = Fleet(launcher, tmp_path, [Place(role="worker", rank=0, host="localhost")], events, {WORKER: 3})
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, WORKER.encode())
    watching = asyncio.create_task(fleet.watch())
    try:
        socket.connect(fleet.hub.address)
        socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
        socket.send_multipart(pack("event", 0, Ready()))
        await fleet.start(30)
        for _ in range(BAD_MESSAGES):
            socket.send_multipart([b"\xc1"])
        await until(lambda: launcher.starts == 2)
        assert launcher.killed == [WORKER]
        told = await events.take()
        assert len([event for event in told if isinstance(event, Dropped)]) == BAD_MESSAGES
        (died,) = [event for event in told if isinstance(event, Died)]
        assert died.restarts and str(died.death).startswith("worker-0 died: its messages cannot be read: ")
    finally:
        context.destroy(linger=0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.stop()


async def test_a_worker_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    launcher = Played()
    fleet = Fleet(launcher, tmp_path, [Place(role="worker", rank=0, host="localhost")], Events())
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, WORKER.encode())
    try:
        socket.connect(fleet.hub.address)
        socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL + 1)))
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fleet.watch())
                tasks.create_task(fleet.start(30))
        line = f"worker-0 died: .*it speaks protocol {PROTOCOL + 1} and this controller speaks {PROTOCOL}"
        assert caught.group_contains(Exception, match=line)
    finally:
        context.destroy(linger=0)
        await fleet.stop()


def request(id: str, **sampling: int) -> Request:
    return Request(id=id, token_ids=np.arange(4, dtype=np.int32), sampling=Sampling(**sampling))  # type: ignore[arg-type]


async def test_friction_32_a_request_that_cannot_be_sent_fails_alone(wire: Wire) -> None:
    socket = wire.socket()
    socket.send_multipart(pack("event", 0, Hello(protocol=PROTOCOL)))
    await until(lambda: wire.heard)
    engine = RemoteEngine(wire.hub, WORKER, load_deadline=60, token_deadline=60)
    pool = EnginePool([engine])
    pool.loaded(Proof(engine=WORKER, version=0, accepted=True))

    async def generate(asked: Request) -> Delta:
        return [delta async for delta in pool.generate(asked)][-1]

    asked = [request("a", max_tokens=2), request("b", max_tokens=2**64), request("c", max_tokens=2)]
    answers = [asyncio.create_task(generate(one)) for one in asked]
    async with asyncio.timeout(30):
        failed = await answers[1]
    assert failed.finish == "failed" and failed.error.startswith("a Request cannot be sent: ")
    await until(lambda: socket.poll(0))
    header, body, *_ = socket.recv_multipart()
    assert b"Submit" in header and b"\xa1a" in body and b"\xa1c" in body and b"\xa1b" not in body
    engine.deliver(msgspec.structs.replace(failed_delta(id, ""), finish="stop") for id in ("a", "c"))
    assert [(await answers[i]).finish for i in (0, 2)] == ["stop", "stop"]
    await engine.close()


def test_friction_32_tokens_that_cannot_be_sent_fail_their_request_alone(tmp_path: Path) -> None:
    sent: list[Message] = []

    class Link(WorkerLink):
        def send(self, message: Message) -> None:
            encode(message)
            sent.append(message)

    good, bad = failed_delta("a", "no"), failed_delta("b", 2**70)  # type: ignore[arg-type]
    send_deltas(Link("engine-0", f"ipc://{tmp_path}/hub", tmp_path), [good, bad])
    ((first, second),) = [message.deltas for message in sent if isinstance(message, Deltas)]
    assert first is good
    assert (second.id, second.finish) == ("b", "failed") and "cannot be sent" in second.error


def test_what_cannot_be_encoded_is_refused_in_one_line() -> None:
    for wrong in (request("a", max_tokens=2**64), request("\ud800", max_tokens=2)):
        with pytest.raises(ChannelError, match="cannot be sent"):
            encode(Submit(requests=[wrong]))


def test_friction_33_a_worker_whose_vital_thread_ends_does_not_outlive_it() -> None:
    program = """
import time
from headrace.channel.vital import vital_thread

def work():
    raise KeyError("lost\\n\\x1b[2J")

vital_thread(work, name="channel").start()
time.sleep(600)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_LOST
    assert done.stderr.splitlines()[-1].startswith("the thread 'channel' ended: KeyError: ")
    assert "\x1b" not in done.stderr
