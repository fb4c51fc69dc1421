"""Broadcasts, through gloo: who asks is served together, and who dies or is cut off holds up nobody for long."""

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from headrace.delivery.base import Entry
from headrace.delivery.plan import make_plan, plan_weights
from headrace.delivery.transports import nccl, nccl_group
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.nccl_group import (
    BroadcastGroup,
    BroadcastReply,
    BroadcastRequest,
    HeldVersion,
    NcclSource,
    ProgressWatch,
    bounded,
    connect,
    key,
    parse_location,
    pieces,
)
from headrace.errors import ConfigError, DeliveryError

PATIENCE = 30.0
"""Of who is served: a busy machine may stand still for seconds."""
SHORT = 1.0
"""Of who waits for the dead."""
PLAN = plan_weights({"a": torch.zeros(1000), "b": torch.zeros(3, 7), "empty": torch.zeros(0)}, "float32")


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {entry.name: torch.randn(entry.shape, generator=generator) for entry in PLAN.entries}


def make_sender(receivers: int = 1, **options: Any) -> NcclSender:
    return NcclSender(receivers=receivers, **{"patience": PATIENCE, "bucket_bytes": 512, "joining": 0.3} | options)


def publish(sender: NcclSender, version: int) -> str:
    location = sender.write(version, PLAN, weights_of(version))
    sender.finish(location)
    return location


class Engine:
    """A source, whose `open` may run in a thread."""

    def __init__(self, patience: float) -> None:
        self.source = NcclSource(patience=patience)
        self.outcome: dict[str, torch.Tensor] | DeliveryError | None = None

    def begin(self, location: str, version: int) -> threading.Thread:
        thread = threading.Thread(target=self._open, args=(location, version))
        thread.start()
        return thread

    def _open(self, location: str, version: int) -> None:
        try:
            self.outcome = self.source.open(location, version, PLAN.entries)
            self.source.verify(location, version)
        except DeliveryError as error:
            self.outcome = error

    def holds(self, version: int) -> bool:
        assert isinstance(self.outcome, dict), self.outcome
        wanted = weights_of(version)
        return self.outcome.keys() == wanted.keys() and all(
            torch.equal(tensor, wanted[name]) for name, tensor in self.outcome.items()
        )


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[list[Engine]]:
    made = [Engine(getattr(request, "param", PATIENCE)) for _ in range(3)]
    yield made
    for engine in made:
        engine.source.close()


def load(engines: list[Engine], location: str, version: int) -> None:
    for thread in [engine.begin(location, version) for engine in engines]:
        thread.join(30)
        assert not thread.is_alive()


def load_again(engine: Engine, location: str, version: int) -> None:
    """Load until it is served: a machine that stands still for `SHORT` breaks an attempt, but not all of them."""
    for _ in range(10):
        load([engine], location, version)
        if isinstance(engine.outcome, dict):
            break
    assert engine.holds(version)


@given(
    st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), st.integers(0, 300)), min_size=1),
    st.integers(0, 500),
)
def test_pieces_cover_every_tensor_once_and_in_order(tensors: list[tuple[str, int]], bucket_bytes: int):
    if not any(length for _, length in tensors):
        return
    entries = make_plan((f"w{i}", dtype, (length,)) for i, (dtype, length) in enumerate(tensors)).entries
    cut = pieces(entries, bucket_bytes)
    covered = [byte for start, stop in cut for byte in range(start, stop)]
    wanted = {byte for entry in entries for byte in range(entry.offset, entry.offset + entry.nbytes)}
    assert covered == sorted(set(covered))
    assert wanted <= set(covered)
    if bucket_bytes:
        assert max(stop - start for start, stop in cut) <= bucket_bytes
        assert len(cut) == math.ceil(max(entry.offset + entry.nbytes for entry in entries) / bucket_bytes)
    else:
        assert set(covered) == wanted
        assert len(cut) == sum(entry.nbytes > 0 for entry in entries)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}, {"per_parameter": True}], ids=str)
def test_engines_that_ask_together_are_one_group_and_it_is_kept(
    engines: list[Engine], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    joined: list[str] = []

    def join(key: str, *arguments: Any) -> BroadcastGroup:
        joined.append(key)
        return BroadcastGroup(key, *arguments)

    monkeypatch.setattr(nccl_group, "BroadcastGroup", join)
    sender = make_sender(3, **{"joining": 60.0} | options)
    for version in range(4):
        location = publish(sender, version)
        load(engines, location, version)
        assert all(engine.holds(version) for engine in engines)
        sender.release(location)
    assert len(joined) == 3 and len(set(joined)) == 1
    assert not torch.distributed.is_initialized()
    sender.close()


def test_an_engine_that_asks_alone_is_served_alone_and_without_delay_once_the_others_have_it(engines: list[Engine]):
    sender = make_sender(2, joining=60.0)
    location = publish(sender, 1)
    load(engines[:2], location, 1)
    started = time.monotonic()
    load(engines[2:], location, 1)
    assert time.monotonic() - started < 30
    load(engines[:1], location, 1)
    assert all(engine.holds(1) for engine in engines)
    sender.release(location)
    load(engines[:2], publish(sender, 2), 2)
    assert engines[0].holds(2) and engines[1].holds(2)
    assert engines[2].holds(1)
    sender.close()


def test_a_missing_engine_is_waited_for_until_the_joining_deadline(engines: list[Engine]):
    sender = make_sender(2)
    location = publish(sender, 1)
    started = time.monotonic()
    load(engines[:1], location, 1)
    assert 0.3 <= time.monotonic() - started < PATIENCE
    assert engines[0].holds(1)
    sender.close()


@pytest.mark.parametrize("engines", [SHORT], indirect=True)
def test_a_lost_bucket_is_an_error_in_time_and_the_next_attempt_is_served(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
):
    sender = make_sender(patience=SHORT)
    load_again(engines[0], publish(sender, 1), 1)
    location = publish(sender, 2)
    with monkeypatch.context() as patched:
        patched.setattr(nccl, "pieces", lambda *arguments: pieces(*arguments)[:-1])
        load(engines[:1], location, 2)
    assert isinstance(engines[0].outcome, DeliveryError)
    with pytest.raises(DeliveryError, match="was not received"):
        engines[0].source.verify(location, 2)
    load_again(engines[0], location, 2)
    sender.close()


class Ghost:
    """Speaks as an engine does and is gone at a step of its choice."""

    def __init__(self, location: str) -> None:
        self.place = parse_location(location)
        self.line: TCPStore = connect(self.place.host, self.place.port, PATIENCE)
        held = msgspec.json.decode(self.line.get(key("held", self.place.place)), type=HeldVersion)
        self.ask = BroadcastRequest("ghost", self.place.place, held.version, held.sequence, "")
        self.number = self.line.add(key("asks"), 1)
        self.line.set(key("ask", self.number), msgspec.json.encode(self.ask).decode())

    def dies_after_asking(self) -> None:
        pass

    def dies_after_joining(self) -> None:
        self.answer = msgspec.json.decode(self.line.get(key("answer", self.number)), type=BroadcastReply)
        self.line.set(key("joined", self.answer.session, self.answer.rank), "yes")
        assert self.line.get(key("begin", self.answer.session)) == b"yes"

    def dies_after_forming_the_group(self) -> None:
        self.dies_after_joining()
        address = (self.place.host, self.place.port)
        answer = self.answer
        BroadcastGroup(answer.group, "gloo", address, answer.rank, answer.size, torch.device("cpu"), PATIENCE).abort()


@pytest.mark.parametrize("engines", [SHORT], indirect=True)
@pytest.mark.parametrize(
    "step", [Ghost.dies_after_asking, Ghost.dies_after_joining, Ghost.dies_after_forming_the_group]
)
def test_an_engine_that_dies_costs_the_others_one_broadcast(engines: list[Engine], step: Callable[[Ghost], None]):
    sender = make_sender(2, patience=SHORT)
    for _ in range(10):
        location = publish(sender, 1)
        thread = engines[0].begin(location, 1)
        step(Ghost(location))
        thread.join(60)
        assert not thread.is_alive()
        if isinstance(engines[0].outcome, DeliveryError):
            break
        sender.release(location)  # A busy machine: the other came after the joining deadline.
    assert isinstance(engines[0].outcome, DeliveryError)
    assert "\n" not in str(engines[0].outcome)
    load_again(engines[0], location, 1)
    load_again(engines[1], location, 1)
    sender.close()


def test_a_place_that_is_written_again_meanwhile_is_refused_or_noticed(engines: list[Engine]):
    sender = make_sender(2, joining=1.0)
    location = publish(sender, 1)
    thread = engines[0].begin(location, 1)
    time.sleep(0.3)
    sender.release(location)
    assert publish(sender, 2) == location
    thread.join(60)
    assert isinstance(engines[0].outcome, DeliveryError)
    assert "used again" in str(engines[0].outcome)
    sender.close()


def test_a_sender_that_closes_ends_the_wait_of_who_asked(engines: list[Engine]):
    sender = make_sender(2, joining=20.0)
    location = publish(sender, 1)
    thread = engines[0].begin(location, 1)
    time.sleep(0.3)
    started = time.monotonic()
    sender.close()
    thread.join(30)
    assert time.monotonic() - started < 20
    assert "is gone" in str(engines[0].outcome)


def test_other_bytes_than_the_plans_are_refused(engines: list[Engine]):
    sender = make_sender()
    location = publish(sender, 1)
    entries = [*PLAN.entries, Entry(name="z", dtype="int8", shape=(1,), offset=PLAN.nbytes, nbytes=1)]
    with pytest.raises(DeliveryError, match=rf"has {PLAN.nbytes} bytes, not {PLAN.nbytes + 1}"):
        engines[0].source.open(location, 1, entries)
    sender.close()


def test_what_hangs_in_a_library_is_given_up():
    release = threading.Event()
    started = time.monotonic()
    with pytest.raises(DeliveryError, match=r"a stuck call: nothing happened for 0\.2 s"):
        bounded(lambda: release.wait(30), ProgressWatch(0.2, "a stuck call"))
    assert time.monotonic() - started < 25
    release.set()


class Wire:
    """The network between an engine and the sender's store, which is cut after so many pieces of data.

    Nobody is told: the sockets of both ends stay open, as if their hosts did not reach each other any more.
    """

    def __init__(self, location: str, after: int) -> None:
        self.whole = threading.Event()
        self.whole.set()
        self._left = after
        self._to = parse_location(location)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.location = location.replace(f":{self._to.port}/", f":{self._listener.getsockname()[1]}/")
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.whole.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection((self._to.host, self._to.port))
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._left -= 1
                if self._left == 0:
                    self.whole.clear()
                self.whole.wait()
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("engines", [SHORT], indirect=True)
@pytest.mark.parametrize("after", [1, 6, 12, 40])
def test_an_engine_that_is_cut_off_gives_up_in_time_and_is_served_when_the_link_is_healed(
    engines: list[Engine], after: int
):
    sender = make_sender(2, patience=SHORT, joining=1.5)
    location = publish(sender, 1)
    wire = Wire(location, after)
    started = time.monotonic()
    load(engines[:1], wire.location, 1)
    assert isinstance(engines[0].outcome, DeliveryError)
    assert not wire.whole.is_set()
    assert time.monotonic() - started < 25
    load_again(engines[1], location, 1)
    wire.whole.set()
    load_again(engines[0], wire.location, 1)
    sender.close()
    wire.close()


def test_a_sender_listens_on_the_address_that_it_was_given(engines: list[Engine]):
    sender = make_sender(3, bind="127.0.0.2", joining=60.0)
    location = publish(sender, 1)
    place = parse_location(location)
    assert place.host == "127.0.0.2"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", place.port), timeout=60)
    load(engines, location, 1)
    assert all(engine.holds(1) for engine in engines)
    sender.close()


def test_groups_of_two_senders_have_different_names(engines: list[Engine], monkeypatch: pytest.MonkeyPatch):
    joined: list[str] = []

    def join(key: str, *arguments: Any) -> BroadcastGroup:
        joined.append(key)
        return BroadcastGroup(key, *arguments)

    monkeypatch.setattr(nccl_group, "BroadcastGroup", join)
    for _ in range(2):
        sender = make_sender()
        load(engines[:1], publish(sender, 1), 1)
        sender.close()
    assert len(set(joined)) == 2


def test_nothing_leaves_the_host_unless_the_network_is_trusted():
    refusal = r'\[cluster\] trusted_network: \[delivery\] transport = "nccl" would listen on 203\.0\.113\.1, '
    with pytest.raises(ConfigError, match=refusal):
        NcclSender(bind="203.0.113.1")
    with pytest.raises(ConfigError, match=r"\[delivery\] bind: cannot listen on 203\.0\.113\.1"):
        NcclSender(bind="203.0.113.1", trusted_network=True)
    with pytest.raises(ConfigError, match="needs an IPv4 address"):
        NcclSender(bind="::1")
    for wrong in ["tcp://127.0.0.1:99/0", "nccl://127.0.0.1/0", "nccl://localhost:9/0"]:
        with pytest.raises(DeliveryError, match="is not a location"):
            NcclSource().open(wrong, 1, PLAN.entries)
    with pytest.raises(DeliveryError, match="cannot be received on cpu"):
        NcclSource().open("nccl://127.0.0.1:99/0", 1, PLAN.entries)
    assert parse_location("gloo://127.0.0.1:99/1").place == 1
