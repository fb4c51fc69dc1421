"""Sockets: only what is missing is asked for again, every wait ends, nothing leaves the host in the clear."""

import contextlib
import errno
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.delivery.plan import plan_weights
from headrace.delivery.transports import tcp, tcp_server
from headrace.delivery.transports.tcp import TcpSource
from headrace.delivery.transports.tcp_paths import PlainConnection
from headrace.delivery.transports.tcp_server import TcpSender
from headrace.delivery.transports.tcp_wire import (
    LARGEST_BUCKET,
    ReadReply,
    ReadRequest,
    make_keys,
    parse_location,
    read_keys,
)
from headrace.errors import ConfigError, DeliveryError

WEIGHTS = {"w": torch.arange(1000, dtype=torch.float32)}
PLAN = plan_weights(WEIGHTS, "float32")
BUCKETS = -(-4000 // 256)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "BUCKET_BYTES", 256)


class Watched(TcpSender):
    """Remembers the ranges that were asked for, and loses those that it is told to lose."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.lose: set[int] = set()
        self.between: dict[int, Any] = {}
        super().__init__()

    def respond(self, frames: list[bytes]) -> list[Any]:
        ask = msgspec.msgpack.decode(frames[0], type=ReadRequest)
        self.asked.append(ask.start)
        self.between.pop(ask.start, lambda: None)()
        answer = super().respond(frames)
        if ask.start in self.lose:
            header = msgspec.msgpack.decode(answer[0], type=ReadReply)
            answer[0] = msgspec.msgpack.encode(msgspec.structs.replace(header, ticket=-7))
        return answer


@pytest.fixture
def sender() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[TcpSource]:
    made = TcpSource(patience=getattr(request, "param", 60.0))
    yield made
    made.close()


def test_a_version_comes_in_buckets_each_asked_for_once(sender: Watched, source: TcpSource):
    location = sender.write(1, PLAN, WEIGHTS)
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    assert sorted(sender.asked) == list(range(0, 4000, 256))


@pytest.mark.parametrize("source", [0.5], indirect=True)
def test_a_lost_bucket_is_an_error_in_time_and_the_next_attempt_asks_for_what_is_missing(
    sender: Watched, source: TcpSource
):
    location = sender.write(1, PLAN, WEIGHTS)
    sender.lose = {512}
    with pytest.raises(DeliveryError, match=r"said nothing for \d+(\.\d+)? s"):
        source.open(location, 1, PLAN.entries)
    with pytest.raises(DeliveryError, match="was not fetched"):
        source.verify(location, 1)
    sender.lose, sender.asked = set(), []
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    assert sender.asked == [512]
    source.verify(location, 1)
    sender.asked = []
    source.open(location, 1, PLAN.entries)
    assert len(sender.asked) == BUCKETS


def test_a_place_that_is_written_in_the_middle_of_a_fetch(sender: Watched, source: TcpSource):
    location = sender.write(1, PLAN, WEIGHTS)

    def write_again() -> None:
        sender.release(location)
        sender.write(2, PLAN, {"w": -WEIGHTS["w"]})

    sender.between[2048] = write_again
    with pytest.raises(DeliveryError, match="holds version 2, not 1: it was used again"):
        source.open(location, 1, PLAN.entries)
    assert torch.equal(source.open(location, 2, PLAN.entries)["w"], -WEIGHTS["w"])


def test_the_same_version_written_twice_is_not_mixed(sender: Watched, source: TcpSource):
    location = sender.write(1, PLAN, WEIGHTS)

    def write_again() -> None:
        sender.release(location)
        sender.write(1, PLAN, {"w": -WEIGHTS["w"]})

    sender.between[2048] = write_again
    with pytest.raises(DeliveryError, match="was written again while version 1 was fetched"):
        source.open(location, 1, PLAN.entries)


def test_a_released_version_and_one_of_another_size_are_refused(sender: Watched, source: TcpSource):
    location = sender.write(1, PLAN, WEIGHTS)
    larger = plan_weights({"w": torch.zeros(1001)}, "float32")
    smaller = plan_weights({"w": torch.zeros(900)}, "float32")
    with pytest.raises(DeliveryError, match="has 4000 bytes, not 4004"):
        source.open(location, 1, larger.entries)
    with pytest.raises(DeliveryError, match="has 4000 bytes, not 3600"):
        source.open(location, 1, smaller.entries)
    sender.release(location)
    with pytest.raises(DeliveryError, match="version 1 was released"):
        source.open(location, 1, PLAN.entries)
    with pytest.raises(DeliveryError, match="there is no place 7"):
        source.open(location[:-1] + "7", 1, PLAN.entries)


@pytest.mark.parametrize("source", [0.5], indirect=True)
def test_a_server_that_says_nothing(source: TcpSource):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DeliveryError, match="said nothing"):
        source.open(f"tcp://127.0.0.1:{silent.getsockname()[1]}/0", 1, PLAN.entries)


def test_many_engines_at_once_and_one_that_vanishes(sender: Watched):
    location = sender.write(1, PLAN, WEIGHTS)
    found: list[bool] = []

    def engine() -> None:
        source = TcpSource()
        found.append(torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"]))
        source.close()

    rude = PlainConnection(parse_location(location))
    for _ in range(50):
        rude.send(ReadRequest(1, 0, 1, 0, 4000))
    engines = [threading.Thread(target=engine) for _ in range(4)]
    for thread in engines:
        thread.start()
    rude.close()
    for thread in engines:
        thread.join(60)
    assert found == [True] * 4


def test_nonsense_is_answered_with_a_refusal():
    sender = TcpSender()
    sender.write(1, PLAN, WEIGHTS)
    for frames in ([], [b"nonsense"], [msgspec.msgpack.encode([1, 0, 1, 0])]):
        (header,) = sender.respond(frames)
        assert "not a request" in msgspec.msgpack.decode(header, type=ReadReply).refusal
    for start, stop in [(-1, 5), (5, 1), (0, 4001), (0, LARGEST_BUCKET + 1)]:
        (header,) = sender.respond([msgspec.msgpack.encode(ReadRequest(1, 0, 1, start, stop))])
        assert msgspec.msgpack.decode(header, type=ReadReply).refusal
    sender.close()


def test_a_client_that_speaks_of_something_else_is_left(source: TcpSource):
    sender = TcpSender()
    location = sender.write(1, PLAN, WEIGHTS)

    def said(nonsense: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", parse_location(location).port), timeout=60) as stranger:
            try:
                stranger.sendall(nonsense)
                stranger.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: stranger.recv(4096), b""))
            except OSError as error:
                # It may be left before it has said all.
                assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN), error
                return b""

    assert said(b"GET / HTTP/1.1\r\n\r\n") == said(b"\xff" * 100) == b""
    assert b"not a request for weights" in said(struct.pack("<IQ", 3, 0) + b"abc")
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    sender.close()


def test_a_server_closes_while_clients_wait_and_while_they_do_not_read(source: TcpSource):
    weights = {"w": torch.zeros(16 << 20)}
    plan = plan_weights(weights, "float32")
    sender = TcpSender()
    location = sender.write(1, plan, weights)
    source.open(sender.write(2, PLAN, WEIGHTS), 2, PLAN.entries)
    full = PlainConnection(parse_location(location))
    full.send(ReadRequest(1, 0, 1, 0, LARGEST_BUCKET))
    time.sleep(0.1)
    started = time.monotonic()
    sender.close()
    assert time.monotonic() - started < 30
    full.close()
    with pytest.raises(DeliveryError, match="is gone"):
        source.open(location, 1, plan.entries)


# ---- beyond the host


@pytest.fixture
def beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 127.0.0.1 as an address beyond the host."""
    monkeypatch.setattr(tcp_server, "is_loopback", lambda address: False)


def test_nothing_listens_beyond_the_host_without_keys(tmp_path: Path):
    for keys in (None, tmp_path / "delivery.keys"):
        with pytest.raises(DeliveryError, match="keys"):
            TcpSender(bind="203.0.113.1", keys=keys)
    make_keys(tmp_path / "delivery.keys")
    with pytest.raises(ConfigError, match=r"\[delivery\] bind: cannot listen on 203.0.113.1: "):
        TcpSender(bind="203.0.113.1", keys=tmp_path / "delivery.keys")


def test_a_location_in_the_clear_beyond_the_host_is_refused(source: TcpSource):
    with pytest.raises(DeliveryError, match="beyond this host and not encrypted"):
        source.open("tcp://203.0.113.1:5555/0", 1, PLAN.entries)
    for nonsense in ("", "tcp://evil.example:1/0", "file:///etc/passwd", "tcp://127.0.0.1:1"):
        with pytest.raises(DeliveryError, match="not a location"):
            source.open(nonsense, 1, PLAN.entries)


def test_friction_45_on_loopback_nothing_is_served_without_the_keys_of_the_run(tmp_path: Path):
    keys, others = tmp_path / "delivery.keys", tmp_path / "others.keys"
    make_keys(keys)
    make_keys(others)
    sender = TcpSender(keys=keys)
    location = sender.write(1, PLAN, WEIGHTS)
    assert location.startswith("tcp://127.0.0.1:")
    for stranger in (TcpSource(), TcpSource(keys=others), TcpSource(keys=tmp_path / "none")):
        with pytest.raises(DeliveryError, match="refused: the keys of the run are needed"):
            stranger.open(location, 1, PLAN.entries)
        stranger.close()
    source = TcpSource(keys=keys)
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    source.verify(location, 1)
    source.close()
    sender.close()


def test_with_the_keys_of_the_run_weights_arrive(beyond: None, tmp_path: Path):
    keys = tmp_path / "delivery.keys"
    make_keys(keys)
    sender = TcpSender(keys=keys)
    location = sender.write(1, PLAN, WEIGHTS)
    assert location.startswith("curve://127.0.0.1:")
    source = TcpSource(keys=keys)
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    source.verify(location, 1)
    source.close()
    sender.close()


def test_without_them_nothing_is_served(beyond: None, tmp_path: Path):
    run, other, mixed = tmp_path / "run.keys", tmp_path / "other.keys", tmp_path / "mixed.keys"
    ours, theirs = make_keys(run), make_keys(other)
    stranger = msgspec.structs.replace(ours, client_public=theirs.client_public, client_secret=theirs.client_secret)
    mixed.touch(mode=0o600)
    mixed.write_bytes(msgspec.json.encode(stranger))
    sender = TcpSender(keys=run)
    location = sender.write(1, PLAN, WEIGHTS)
    for keys in (other, mixed):
        source = TcpSource(keys=keys, patience=1.0)
        with pytest.raises(DeliveryError, match=r"does not accept the keys|is gone|said nothing"):
            source.open(location, 1, PLAN.entries)
        source.close()
    source = TcpSource(patience=1.0)
    with pytest.raises(DeliveryError, match="keys"):
        source.open(location, 1, PLAN.entries)
    with pytest.raises(DeliveryError, match=r"is gone|said nothing"):
        source.open(location.replace("curve", "tcp"), 1, PLAN.entries)
    source.close()
    assert torch.equal(sender.snapshot(location, PLAN)["w"], WEIGHTS["w"])
    sender.close()


def test_the_bytes_on_the_wire_are_not_the_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    keys = tmp_path / "delivery.keys"
    make_keys(keys)
    for encrypted in (True, False):
        monkeypatch.setattr(tcp_server, "is_loopback", lambda address, encrypted=encrypted: not encrypted)
        sender = TcpSender(keys=keys if encrypted else None)
        location = sender.write(1, PLAN, WEIGHTS)
        seen = bytearray()
        listener = socket.create_server(("127.0.0.1", 0))
        relay = threading.Thread(target=_relay, args=(listener, parse_location(location).port, seen))
        relay.start()
        port = listener.getsockname()[1]
        source = TcpSource(keys=keys)
        via = location.replace(f":{parse_location(location).port}/", f":{port}/")
        assert torch.equal(source.open(via, 1, PLAN.entries)["w"], WEIGHTS["w"])
        source.close()
        sender.close()
        relay.join(60)
        assert len(seen) > 4000
        assert (WEIGHTS["w"][64:128].numpy().tobytes() in bytes(seen)) == (not encrypted)


def _relay(listener: socket.socket, port: int, seen: bytearray) -> None:
    """Pass bytes on in both directions, and keep those of the server."""
    with listener, listener.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as server:
        for end in (client, server):
            end.settimeout(0.01)
        idle = 0
        while idle < 500:
            for one, other in ((client, server), (server, client)):
                try:
                    data = one.recv(1 << 16)
                except TimeoutError:
                    idle += 1
                    continue
                if not data:
                    return
                idle = 0
                seen.extend(data if one is server else b"")
                other.sendall(data)


class Wire:
    """Passes bytes on between clients and a server, until it loses the connections that it has."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self) -> None:
        """Pass nothing more on through the connections of now. Neither end is told."""
        self._lost.set()
        self._lost = threading.Event()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._open):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._port))
                self._open += [client, server]
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(*ends, self._lost), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, lost: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if lost.is_set():
                    return
                other.sendall(data)


def test_after_a_silence_the_next_attempt_makes_a_new_connection(beyond: None, tmp_path: Path):
    keys = tmp_path / "delivery.keys"
    make_keys(keys)
    sender = TcpSender(keys=keys)
    first, second = (sender.write(version, PLAN, WEIGHTS) for version in (1, 2))
    wire = Wire(parse_location(first).port)
    first, second = (at.replace(f":{parse_location(at).port}/", f":{wire.port}/") for at in (first, second))
    source = TcpSource(keys=keys, patience=3.0)
    source.open(first, 1, PLAN.entries)
    wire.lose()
    with pytest.raises(DeliveryError, match="said nothing for"):
        source.open(second, 2, PLAN.entries)
    assert torch.equal(source.open(second, 2, PLAN.entries)["w"], WEIGHTS["w"])
    for each in (source, wire, sender):
        each.close()


def test_keys_that_others_can_read_or_that_are_damaged_are_refused(tmp_path: Path):
    path = tmp_path / "delivery.keys"
    first = make_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == first
    assert make_keys(path) != first
    path.chmod(0o640)
    with pytest.raises(DeliveryError, match=r"can be read by others \(mode 0640, not 0600\)"):
        read_keys(path)
    path.chmod(0o600)
    path.write_text("{}")
    with pytest.raises(DeliveryError, match="are damaged"):
        read_keys(path)
    assert [found.name for found in tmp_path.iterdir()] == ["delivery.keys"]
