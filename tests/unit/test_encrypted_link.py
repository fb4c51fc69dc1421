"""The link beyond one host: only the processes that were started for a run get in, each as itself and in its epoch."""

import asyncio
import contextlib
import resource
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import zmq

from headrace.channel.codec import PROTOCOL, Message, pack
from headrace.channel.heartbeats import Heartbeat, Hello, LogText, Welcome
from headrace.channel.hub import Hub
from headrace.channel.worker_link import LinkKeys, WorkerLink
from headrace.errors import PeerDied
from waiting import until


class HeardBy:
    """A hub on loopback that is encrypted, and what it has heard, dropped and found silent."""

    def __init__(self, **settings: float) -> None:
        self.messages: list[tuple[str, Message]] = []
        self.dropped: list[str] = []
        self.silent: list[PeerDied] = []
        self.hub = Hub(
            "tcp://127.0.0.1:*",
            lambda peer, message: self.messages.append((peer, message)),
            self.silent.append,
            lambda peer, reason, refused: self.dropped.append(reason),
            names={"engine-0", "engine-1"},
            **settings,
        )
        self.hub.start()

    def beats(self, peer: str) -> int:
        return sum(name == peer and isinstance(message, Heartbeat) for name, message in self.messages)

    def link(
        self,
        name: str,
        epoch: int = 0,
        *,
        admitted: bool = True,
        lost: list[str] | None = None,
        new_log_text: Callable[[], str] = str,
    ) -> WorkerLink:
        keys = LinkKeys.made(self.hub.public_key)
        if admitted:
            self.hub.expect(name, epoch, keys.public.decode())
        on_lost = (lambda: lost.append(name)) if lost is not None else lambda: None
        return WorkerLink(name, self.hub.address, None, on_lost, epoch=epoch, keys=keys, new_log_text=new_log_text)


@pytest.fixture
async def heard() -> AsyncIterator[HeardBy]:
    found = HeardBy()
    yield found
    await found.hub.close()


async def test_a_worker_whose_key_is_known_is_heard(heard: HeardBy) -> None:
    assert heard.hub.address.startswith("tcp://127.0.0.1:")
    link = heard.link("engine-0")
    link.start()
    await until(lambda: heard.beats("engine-0") > 1)
    assert heard.messages[0][0] == "engine-0"
    assert isinstance(heard.messages[0][1], Hello)
    assert heard.messages[0][1].without_files
    link.close()


async def test_a_worker_may_connect_before_its_key_is_known(heard: HeardBy) -> None:
    keys = LinkKeys.made(heard.hub.public_key)
    link = WorkerLink("engine-0", heard.hub.address, None, lambda: None, keys=keys)
    link.start()
    await asyncio.sleep(0.5)
    assert heard.messages == []
    heard.hub.expect("engine-0", 0, keys.public.decode())
    await until(lambda: heard.beats("engine-0"))
    link.close()


async def test_what_a_worker_starts_from_and_its_log_travel_over_the_link(heard: HeardBy, tmp_path: Path) -> None:
    lines = ["first line\n", "second line\n"]
    link = heard.link("engine-0", new_log_text=lambda: lines.pop(0) if lines else "")
    link.start()
    await until(lambda: heard.messages)
    sent = Welcome(run="run", token="t", files={"config.toml": b"\x00\xff"}, silence_seconds=7.0, last_step=3)
    await heard.hub.send("engine-0", sent)
    welcomed: list[Welcome] = []

    def settle(welcome: Welcome) -> Path:
        welcomed.append(welcome)
        return tmp_path

    await asyncio.to_thread(link.receive_welcome, settle)
    assert welcomed == [sent]
    assert link.run_dir == tmp_path
    await until(lambda: sum(isinstance(message, LogText) for _, message in heard.messages) == 2)
    texts = [message.text for _, message in heard.messages if isinstance(message, LogText)]
    assert texts == ["first line\n", "second line\n"]
    link.close()


async def test_a_process_of_an_older_epoch_is_told_to_end_and_is_not_heard(heard: HeardBy) -> None:
    lost: list[str] = []
    old = heard.link("engine-0", lost=lost)
    old.start()
    await until(lambda: heard.beats("engine-0"))
    new = heard.link("engine-0", epoch=1)
    new.start()
    await until(lambda: lost)
    assert any("engine-0 was replaced, and came back" in line for line in heard.dropped)
    heard.messages.clear()
    await until(lambda: heard.beats("engine-0") > 1)
    old.close()
    new.close()


async def test_a_key_opens_the_link_for_its_own_worker_only(heard: HeardBy) -> None:
    keys = LinkKeys.made(heard.hub.public_key)
    heard.hub.expect("engine-1", 0, keys.public.decode())
    thief = WorkerLink("engine-0", heard.hub.address, None, lambda: None, keys=keys)
    thief.start()
    await until(lambda: heard.dropped)
    assert heard.dropped[0] == "'engine-0' has the key of another worker"
    assert heard.messages == []
    thief.close()


@contextlib.contextmanager
def dealer(address: str, name: str, keys: LinkKeys | None):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.setsockopt(zmq.IDENTITY, name.encode())
    if keys is not None:
        stranger.setsockopt(zmq.CURVE_SERVERKEY, keys.hub)
        stranger.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        stranger.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    stranger.connect(address)
    try:
        yield stranger
    finally:
        stranger.close()
        context.term()


async def test_strangers_get_nothing_and_the_link_goes_on(heard: HeardBy) -> None:
    link = heard.link("engine-0")
    link.start()
    await until(lambda: heard.beats("engine-0"))
    hello = pack("event", 0, Hello(protocol=PROTOCOL))
    wrong = LinkKeys.made(heard.hub.public_key)
    other_hub = LinkKeys(zmq.curve_keypair()[0], wrong.public, wrong.secret)
    host, port = heard.hub.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as strangers:
        sockets = [
            strangers.enter_context(dealer(heard.hub.address, "engine-0", keys)) for keys in (None, wrong, other_hub)
        ]
        for one in sockets:
            one.send_multipart(hello)
        garbage = socket.create_connection((host, int(port)), timeout=10)
        garbage.sendall(secrets.token_bytes(1 << 16))
        half = socket.create_connection((host, int(port)), timeout=10)
        half.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03")
        count = heard.beats("engine-0")
        await until(lambda: heard.beats("engine-0") > count + 4)
        assert not any(one.poll(0) for one in sockets)
        assert {peer for peer, _ in heard.messages} == {"engine-0"}
        assert heard.dropped == []
        garbage.close()
        half.close()
    link.close()


async def test_two_thousand_connections_of_strangers_do_not_end_the_link(heard: HeardBy) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 8192, "this test needs 4,000 open files"
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, hard))
    link = heard.link("engine-0")
    link.start()
    host, port = heard.hub.address.removeprefix("tcp://").split(":")
    held = []
    try:
        await until(lambda: heard.beats("engine-0"))
        for n in range(2000):
            held.append(socket.create_connection((host, int(port)), timeout=10))
            if n % 100 == 0:
                await asyncio.sleep(0)
        count = heard.beats("engine-0")
        await until(lambda: heard.beats("engine-0") > count + 2)
        assert heard.silent == []
    finally:
        for one in held:
            one.close()
        link.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
