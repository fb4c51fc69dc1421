"""Deliveries to an engine without a second copy of its weights: versions are written straight over the live weights.

Nothing is sampled until the new weights are proved. `tests/gpu/test_one_copy_on_gpu.py` is the same on a GPU.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from delivery_parts import BUCKET_BYTES, Publishing, Serving, watch_copies

from headrace.delivery import receiver
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.transports import tcp
from headrace.delivery.transports.base import Spanning
from headrace.delivery.transports.file import FileSource
from headrace.delivery.transports.tcp import TcpSource

RUN_ID = f"one-copy-{os.getpid()}"
TRANSPORTS: tuple[str, ...] = ("shm", "file", "tcp")
DEVICE = "cpu"
STREAMED = ("file", "tcp")
"""Transports whose bytes an engine cannot read in place, so that they arrive in buckets while it is stopped."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", metafunc.module.TRANSPORTS)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(receiver, "BUCKET_BYTES", 4 * BUCKET_BYTES)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.module.DEVICE)


@pytest.fixture
def trainer(tmp_path: Path, device: str, transport: str) -> Iterator[Publishing]:
    made = Publishing(transport, "full", RUN_ID, tmp_path / "weights", device=device)
    yield made
    made.close()


@pytest.fixture
def engine(trainer: Publishing, device: str) -> Iterator[Serving]:
    """An engine in one copy that decodes three requests under version 1."""
    made = Serving("full", device=device, staging="none")
    for number in range(3):
        made.submit(f"r{number}", 4000)
    assert made.load(trainer.publish(1)).accepted
    trainer.acknowledge(1)
    made.go_on(1)
    yield made
    made.stop()


def resume(engine: Serving) -> None:
    for name, delta in engine.answers().items():
        engine.submit(f"{name}+", 4000, np.concatenate([engine.prompts[name], delta.token_ids]))


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_versions_are_proved_in_one_copy(trainer: Publishing, device: str, kv: str) -> None:
    engine = Serving("full", kv=kv, device=device, staging="none")
    try:
        engine.submit("r", 4000)
        for version in (1, 2, 3):
            manifest = trainer.publish(version)
            proof = engine.load(manifest)
            assert proof.accepted and proof.live_digest == manifest.digest, proof.reason
            assert engine.holds(version)
            trainer.acknowledge(version)
            engine.go_on(version)
        engine.loop.abort().result(30)
        engine.check_answers()
        assert set(engine.answers()["r"].versions.tolist()) == {1, 2, 3}
    finally:
        engine.stop()


@pytest.mark.parametrize("interrupt", ["abort", "drain", "block"])
def test_every_interrupt_goes_with_one_copy(trainer: Publishing, device: str, interrupt: str) -> None:
    engine = Serving("full", interrupt, device=device, staging="none")
    try:
        assert engine.load(trainer.publish(1)).accepted
        trainer.acknowledge(1)
        engine.submit("r", 4000 if interrupt == "abort" else 60)
        engine.go_on(1)
        proof = engine.load(trainer.publish(2))
        assert proof.accepted and engine.holds(2), proof.reason
        first = engine.wait(lambda found: found["r"].finish is not None)["r"]
        assert first.finish == ("aborted" if interrupt == "abort" else "length") and set(first.versions.tolist()) == {1}
        engine.submit("r+", 20, np.concatenate([engine.prompts["r"], first.token_ids]))
        rest = engine.wait(lambda found: "r+" in found and found["r+"].finish is not None)["r+"]
        assert rest.finish == "length" and set(rest.versions.tolist()) == {2}
        engine.check_answers()
    finally:
        engine.stop()


@pytest.mark.parametrize("kv", ["recompute", "keep"], ids=["merged", "unmerged"])
def test_adapters_are_proved_in_one_copy(transport: str, tmp_path: Path, device: str, kv: str) -> None:
    trainer = Publishing(transport, "adapter", RUN_ID, tmp_path / "weights", device=device)
    engine = Serving("adapter", kv=kv, device=device, staging="none")
    try:
        engine.submit("r", 4000)
        for version in (1, 2):
            proof = engine.load(trainer.publish(version))
            assert proof.accepted and engine.holds(version), proof.reason
            trainer.acknowledge(version)
            engine.go_on(version)
        engine.loop.abort().result(30)
        engine.check_answers()
    finally:
        engine.stop()
        trainer.close()


def test_no_token_is_sampled_between_the_first_byte_and_the_proof(
    trainer: Publishing, engine: Serving, transport: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()

    def stop() -> None:
        reached.set()
        assert go.wait(30)

    manifest = trainer.publish(2)
    watch_copies(monkeypatch, transport, device, stop)
    load = engine.loop.load(manifest)
    assert reached.wait(30)
    before = engine.loop.counters()
    assert before.version == -1 and before.running == 3
    assert not engine.holds(1) and not engine.holds(2), "the copy is half done"
    threading.Event().wait(0.3)  # Hundreds of steps of this model.
    assert engine.loop.counters().generated_tokens == before.generated_tokens
    assert not load.done()
    go.set()
    assert load.result(30).accepted and engine.holds(2)
    engine.go_on(2)
    engine.loop.abort().result(30)
    engine.check_answers()


def test_damage_on_the_way_is_repaired_by_a_second_fetch(
    trainer: Publishing,
    engine: Serving,
    transport: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    manifest = trainer.publish(2)
    watch_copies(monkeypatch, transport, device, damaged={1})
    with caplog.at_level(logging.WARNING, "headrace.delivery"):
        proof = engine.load(manifest)
    assert proof.accepted and engine.holds(2), proof.reason
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["version 2 is fetched again"]
    engine.go_on(2)
    engine.loop.abort().result(30)
    engine.check_answers()
    assert all(set(delta.versions.tolist()) == {1, 2} for delta in engine.answers().values()), "requests go on"


def test_a_version_that_is_wrong_twice_quarantines_and_returns_partials(
    trainer: Publishing, engine: Serving, transport: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish(2)
    watch_copies(monkeypatch, transport, device, damaged={1, 2})
    proof = engine.load(manifest)
    assert "the live weights have digest" in proof.reason and "no weights until a version is proved" in proof.reason
    loses_its_weights(engine, proof)
    trainer.acknowledge(2)
    serves_anew(engine, trainer.publish(3), 3)


def loses_its_weights(engine: Serving, proof: Proof) -> None:
    """The engine is in quarantine, all requests have ended with what they had, and a new one gets no token."""
    assert not proof.accepted and proof.quarantined
    partials = engine.wait(lambda found: all(delta.finish for delta in found.values()))
    assert {delta.finish for delta in partials.values()} == {"aborted"} and len(partials) == 3
    assert all(len(delta.token_ids) and set(delta.versions.tolist()) == {1} for delta in partials.values())
    generated = engine.loop.counters().generated_tokens
    engine.submit("late", 20)
    threading.Event().wait(0.2)
    assert engine.loop.counters().generated_tokens == generated and engine.loop.counters().version == -1
    assert "late" not in engine.answers()


def serves_anew(engine: Serving, manifest: Manifest, version: int) -> None:
    proof = engine.load(manifest)
    assert proof.accepted and not proof.quarantined and engine.holds(version), proof.reason
    engine.wait(lambda found: "late" in found and found["late"].finish == "length")
    resume(engine)
    engine.go_on(version)
    engine.loop.abort().result(30)
    engine.check_answers()


def test_a_publisher_that_is_gone_in_mid_copy_quarantines(
    trainer: Publishing, engine: Serving, transport: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = trainer.publish(2)
    watch_copies(monkeypatch, transport, device, trainer.close)
    proof = engine.load(manifest)
    if transport in STREAMED:
        loses_its_weights(engine, proof)
    else:
        assert proof.accepted and engine.holds(2), "memory that an engine has mapped outlives its owner's close"
        engine.loop.abort().result(30)
        engine.submit("late", 20)
    monkeypatch.undo()
    after = Publishing(transport, "full", RUN_ID, tmp_path / "next", device=device)
    try:
        serves_anew(engine, after.publish(3), 3)
    finally:
        after.close()


def test_a_version_that_cannot_be_fetched_at_all_changes_nothing(
    trainer: Publishing, engine: Serving, transport: str
) -> None:
    manifest = trainer.publish(2)
    trainer.close()
    proof = engine.load(manifest)
    if proof.accepted:
        assert transport in ("shm", "cuda_ipc"), "a place that was mapped before may still be read"
        return
    assert not proof.quarantined and engine.holds(1)
    engine.go_on(1)


def test_a_change_is_refused_because_there_is_no_copy_to_change(
    tmp_path: Path, engine: Serving, transport: str, device: str
) -> None:
    changes = Publishing(transport, "delta", RUN_ID, tmp_path / "delta", device=device)
    try:
        for version in (2, 3):
            manifest = changes.publish(version)
            proof = engine.load(manifest)
            assert proof.accepted == (manifest.kind == "full")
            if not proof.accepted:
                assert "no second copy to change" in proof.reason and not proof.quarantined
                assert engine.load(changes.publisher.resend(manifest).result(30)).accepted
            changes.acknowledge(version)
        assert manifest.kind == "delta"
    finally:
        changes.close()


def test_which_transports_arrive_in_buckets() -> None:
    assert all(isinstance(source, Spanning) for source in (FileSource(), TcpSource()))
