"""Many engines over `tcp`: the trainer sends two copies, engines hand the version on, and none of them is trusted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from delivery_parts import BUCKET_BYTES, KINDS, SECONDS, Holding, Publishing

from headrace.delivery import receiver, transports
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.plan import plan_weights
from headrace.delivery.transports import tcp, tcp_server
from headrace.delivery.transports.base import SenderSettings, Source
from headrace.delivery.transports.tcp import TcpSource
from headrace.delivery.transports.tcp_server import FAN_OUT, TREE_ABOVE, Relay, TcpSender, refusal
from headrace.delivery.transports.tcp_wire import ReadRequest, TcpLocation, make_keys, parse_location
from headrace.errors import DeliveryError

ENGINES = 7


@pytest.fixture(autouse=True)
def small_buckets_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(tcp, "RELAY_PATIENCE", 0.5)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[TcpSource]:
    """The engines' ends of the transport, in the order in which engines first load a version."""
    made: list[TcpSource] = []
    real = receiver.source

    def source(name: str, **options: Any) -> Source:
        opened = real(name, **options)
        assert isinstance(opened, TcpSource)
        made.append(opened)
        return opened

    monkeypatch.setattr(receiver, "source", source)
    return made


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trainer(tmp_path: Path, kind: str) -> Iterator[Publishing]:
    made = Publishing("tcp", kind, f"tree-{os.getpid()}", tmp_path, receivers=ENGINES)
    yield made
    made.close()


@pytest.fixture
def engines(kind: str) -> Iterator[list[Holding]]:
    ports = threading.active_count()
    made = [Holding(kind, f"engine-{number}") for number in range(ENGINES)]
    yield made
    for engine in made:
        engine.stop()
    # The trainer's threads end when they see that their engines have left.
    deadline = time.monotonic() + 5
    while threading.active_count() > ports + 1:
        assert time.monotonic() < deadline, "no relay is left"
        time.sleep(0.01)


def travelling(manifest: Manifest) -> int:
    return max(entry.offset + entry.nbytes for entry in manifest.payload or manifest.entries)


def load_all(engines: list[Holding], manifest: Manifest) -> list[Proof]:
    """All at once."""
    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(lambda engine: engine.load(manifest), engines, timeout=SECONDS))


def proved(engines: list[Holding], manifest: Manifest) -> None:
    for engine, proof in zip(engines, load_all(engines, manifest), strict=True):
        assert proof.accepted and proof.live_digest == proof.staged_digest == manifest.digest, proof.reason
        assert engine.holds(manifest.version)


def sent(trainer: Publishing) -> int:
    assert isinstance(trainer.sender, TcpSender)
    return trainer.sender.sent_bytes


def relay_of(source: TcpSource) -> Relay:
    assert source.relay is not None, "nothing was shared"
    return source.relay


def test_seven_engines_have_the_trainers_bits_and_it_sends_two_copies(
    trainer: Publishing, engines: list[Holding], kind: str
) -> None:
    for version in (1, 2, 3):
        before, manifest = sent(trainer), trainer.publish(version)
        assert manifest.kind == ("full" if kind == "delta" and version == 1 else kind)
        proved(engines, manifest)
        assert FAN_OUT == 2 and sent(trainer) - before == 2 * travelling(manifest)
        trainer.acknowledge(version)


def test_a_late_engine_gets_the_version_from_another(trainer: Publishing, engines: list[Holding]) -> None:
    manifest = trainer.publish(1)
    proved(engines[:-1], manifest)
    before = sent(trainer)
    proved(engines[-1:], manifest)
    assert sent(trainer) == before


def test_a_relay_that_flips_a_bit_is_caught_and_the_trainer_heals_it(
    trainer: Publishing,
    engines: list[Holding],
    sources: list[TcpSource],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = trainer.publish(1)
    for engine in engines:
        proved([engine], manifest)
    trainer.acknowledge(1)
    manifest = trainer.publish(2)
    assert manifest.kind == kind
    for engine in engines[:2]:
        proved([engine], manifest)
    liar, wrong = relay_of(sources[0]), travelling(manifest) - 5
    honest = liar.respond

    def flipped(frames: list[bytes]) -> list[Any]:
        ask, (header, *payload) = msgspec.msgpack.decode(frames[0], type=ReadRequest), honest(frames)
        if not payload or not ask.start <= wrong < ask.stop:
            return [header, *payload]
        damaged = bytearray(payload[0])
        damaged[wrong - ask.start] ^= 1
        return [header, bytes(damaged)]

    monkeypatch.setattr(liar, "respond", flipped)
    before = sent(trainer)
    with caplog.at_level(logging.WARNING):
        proved(engines[2:3], manifest)
    assert f"version 2 was wrong as {liar.location} sent it" in caplog.text
    assert sent(trainer) - before == travelling(manifest), "all of it, from the trainer"
    # Nobody else is sent to that one.
    proved(engines[3:], manifest)
    assert sent(trainer) - before == travelling(manifest)


def test_a_relay_that_goes_in_mid_transfer_costs_nobody_the_version(
    trainer: Publishing,
    engines: list[Holding],
    sources: list[TcpSource],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = trainer.publish(1)
    for engine in engines[:2]:
        proved([engine], manifest)
    before, answered = sent(trainer), []
    closing = threading.Thread(target=relay_of(sources[0]).close)
    honest = Relay.respond

    def stumble(relay: Relay, frames: list[bytes]) -> list[Any]:
        answered.append(frames)
        if len(answered) == 1:
            return honest(relay, frames)
        if len(answered) == 2:
            # Beside this thread, which the relay waits for when it closes.
            closing.start()
        return refusal("this is not a request for weights")

    with monkeypatch.context() as damage, caplog.at_level(logging.WARNING):
        damage.setattr(Relay, "respond", stumble)
        proved(engines[2:3], manifest)
        closing.join(SECONDS)
    assert answered and "does not come from its relay, but from the trainer" in caplog.text
    # What had come already is not asked for again.
    assert (
        0 < sent(trainer) - before <= max(0, travelling(manifest) - BUCKET_BYTES) or travelling(manifest) < BUCKET_BYTES
    )
    proved(engines[3:], manifest)


def test_a_relay_that_says_nothing_or_has_gone_on_is_not_waited_for(
    trainer: Publishing,
    engines: list[Holding],
    sources: list[TcpSource],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = trainer.publish(1)
    for engine in engines[:2]:
        proved([engine], manifest)
    with monkeypatch.context() as damage, caplog.at_level(logging.WARNING):
        damage.setattr(Relay, "respond", lambda relay, frames: refusal("this is not a request for weights"))
        started = time.monotonic()
        proved(engines[2:3], manifest)
    assert "said nothing" in caplog.text and time.monotonic() - started < 30
    for source in sources[1:3]:
        relay_of(source).withdraw()
    caplog.clear()
    proved(engines[3:4], manifest)
    assert "was released" in caplog.text
    proved(engines[4:], manifest)


def test_engines_that_die_while_others_wait_for_them(
    trainer: Publishing, engines: list[Holding], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish(1)
    assert isinstance(trainer.sender, TcpSender)
    location = parse_location(manifest.location)
    for name in ("dies-1", "dies-2"):
        trainer.sender.respond([msgspec.msgpack.encode(ReadRequest(1, location.place, 1, 0, 0, name))])
    waiting = threading.Thread(target=proved, args=([engines[0]], manifest))
    waiting.start()
    time.sleep(0.3)
    assert waiting.is_alive() and sent(trainer) == 0, "there is no place at the trainer, and nobody has the version"
    with monkeypatch.context() as patience:
        patience.setattr(tcp_server, "SILENCE", 0.0)
        waiting.join(SECONDS)
    assert not waiting.is_alive() and engines[0].holds(1)
    proved(engines[1:], manifest)
    assert sent(trainer) == travelling(manifest)


# ---- the transport by itself

WEIGHTS = {"w": torch.arange(1000, dtype=torch.float32)}
PLAN = plan_weights(WEIGHTS, "float32")


def test_few_engines_make_no_tree() -> None:
    for receivers, tree in ((1, False), (TREE_ABOVE, False), (TREE_ABOVE + 1, True)):
        sender = transports.sender("tcp", SenderSettings(run_id="run", receivers=receivers))
        assert parse_location(sender.write(1, PLAN, WEIGHTS)).tree == tree
        sender.close()
    parts = transports.sender("tcp", SenderSettings(run_id="run", receivers=TREE_ABOVE + 1, relays=False))
    assert not parse_location(parts.write(1, PLAN, WEIGHTS)).tree
    parts.close()


def test_what_is_not_proved_is_not_handed_on() -> None:
    sender, first, second = TcpSender(receivers=ENGINES), TcpSource(), TcpSource()
    location = sender.write(1, PLAN, WEIGHTS)
    first.open(location, 1, PLAN.entries)
    assert first.relay is None
    first.share(location, 1)
    served = parse_location(relay_of(first).location)
    assert served.host == "127.0.0.1" and served.port != parse_location(location).port
    # The next version takes its memory: nobody gets a mix.
    first.open(sender.write(2, PLAN, {"w": -WEIGHTS["w"]}), 2, PLAN.entries)
    with pytest.raises(DeliveryError, match="was released"):
        second.open(relay_of(first).location, 1, PLAN.entries)
    for one in (first, second, sender):
        one.close()


def test_relays_of_an_encrypted_version_are_encrypted_and_know_their_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tcp_server, "is_loopback", lambda address: False)
    keys, others = tmp_path / "delivery.keys", tmp_path / "others.keys"
    make_keys(keys)
    make_keys(others)
    sender = TcpSender(keys=keys, receivers=ENGINES)
    location = sender.write(1, PLAN, WEIGHTS)
    sources = [TcpSource(keys=keys) for _ in range(3)]
    for source in sources:
        assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
        source.verify(location, 1)
        source.share(location, 1)
    assert sender.sent_bytes == 2 * PLAN.nbytes
    relay = relay_of(sources[0])
    assert relay.location.startswith("curve://127.0.0.1:")
    stranger = TcpSource(keys=others, patience=1.0)
    with pytest.raises(DeliveryError, match=r"does not accept the keys|is gone|said nothing"):
        stranger.open(relay.location, 1, PLAN.entries)
    for one in (*sources, stranger, sender):
        one.close()


def test_a_relay_in_the_clear_of_an_encrypted_version_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_server, "is_loopback", lambda address: False)
    keys = tmp_path / "delivery.keys"
    make_keys(keys)
    sender = TcpSender(keys=keys, receivers=ENGINES)
    location = sender.write(1, PLAN, WEIGHTS)
    liar = Relay(TcpLocation(False, "127.0.0.1", 9, 0), None)
    liar.serve(1, 1, torch.from_numpy(np.zeros(PLAN.nbytes, np.uint8)))
    for name in ("a", "b"):
        sender.respond([msgspec.msgpack.encode(ReadRequest(1, 0, 1, 0, 0, name, liar.location if name == "a" else ""))])
    source = TcpSource(keys=keys)
    assert torch.equal(source.open(location, 1, PLAN.entries)["w"], WEIGHTS["w"])
    assert "is not encrypted as the trainer is" in caplog.text and not source.relayed
    for one in (source, liar, sender):
        one.close()
