"""Delivery as a whole: a trainer's bits become a real engine's while it decodes, or are refused and change nothing.

Every transport, every kind, every interrupt mode and both choices for the KV cache, each with each. Then what can go
wrong on the way. `tests/gpu/test_delivery_contract.py` is the same for trainers and engines on a GPU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from delivery_parts import BUCKET_BYTES, KINDS, Publishing, Serving

from headrace.delivery import receiver
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.live import DeviceCopies
from headrace.delivery.plan import PackingPlan
from headrace.delivery.transports import WITHOUT_GPU, cuda_ipc, nccl, nccl_group, tcp
from headrace.delivery.transports.base import Source
from headrace.delivery.transports.cuda_ipc import CudaIpcSender
from headrace.delivery.transports.file import FileSender
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.nccl_group import NcclSource
from headrace.delivery.transports.shm import ShmSender
from headrace.delivery.transports.tcp import TcpSource
from headrace.delivery.transports.tcp_server import TcpSender
from headrace.delivery.transports.tcp_wire import ReadReply, ReadRequest
from headrace.engines.base import Delta

RUN_ID = f"delivery-{os.getpid()}"
TRANSPORTS = WITHOUT_GPU
DEVICE = "cpu"
Publish = Callable[[str, str], Publishing]
Serve = Callable[..., Serving]


@pytest.fixture(autouse=True)
def small_buckets_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = receiver.source

    def source(name: str, **options: Any) -> Source:
        return NcclSource(patience=5.0) if name == "nccl" else real(name, **options)

    monkeypatch.setattr(tcp, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(receiver, "source", source)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", metafunc.module.TRANSPORTS)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.module.DEVICE)


@pytest.fixture
def publishing(tmp_path: Path, device: str) -> Iterator[Publish]:
    made: list[Publishing] = []

    def make(transport: str, kind: str) -> Publishing:
        made.append(Publishing(transport, kind, RUN_ID, tmp_path / "weights", device=device))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def serving(device: str) -> Iterator[Serve]:
    made: list[Serving] = []

    def make(*arguments: str, **changes: int) -> Serving:
        made.append(Serving(*arguments, **changes, device=device))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def proved(engine: Serving, trainer: Publishing, version: int) -> Manifest:
    """Publish a version, load it, and see that it is live bit for bit."""
    manifest = trainer.publish(version)
    proof = engine.load(manifest)
    assert proof.accepted, proof.reason
    assert proof.live_digest == proof.staged_digest == manifest.digest
    assert engine.holds(version)
    trainer.acknowledge(version)
    return manifest


def versions_of(delta: Delta) -> set[int]:
    return set(delta.versions.tolist())


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize("interrupt", ["never", "abort", "drain", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_live_weights_are_the_trainers_and_every_token_is_its_versions(
    publishing: Publish, serving: Serve, transport: str, kind: str, interrupt: str, kv: str
) -> None:
    trainer, engine = publishing(transport, kind), serving(kind, interrupt, kv)
    # Three run at a time: all of these must be interrupted where that is the mode, or must have others behind them.
    count, length = (3, 4000) if interrupt in ("never", "abort") else (5, 10)
    ask(engine, 1, count, length)
    for version in (1, 2, 3):
        manifest = proved(engine, trainer, version)
        assert manifest.kind == ("full" if kind == "delta" and version == 1 else kind)
        if interrupt == "abort":
            resume(engine, length)
        elif interrupt != "never":
            ask(engine, version + 1, count, length)
        engine.go_on(version)
    engine.loop.abort().result(30)
    engine.check_answers()
    answers = engine.answers()
    spans = {name: versions_of(delta) for name, delta in answers.items() if len(delta.token_ids)}
    if interrupt == "never":
        assert all(spans[f"1/{n}"] == {1, 2, 3} for n in range(3)), "running sequences go on"
        return
    assert all(len(versions) == 1 for versions in spans.values()), "no answer is of two versions"
    if interrupt == "abort":
        assert [spans["1/0" + "+" * n] for n in range(3)] == [{1}, {2}, {3}], "partial answers go on by prefix"
    elif interrupt == "drain":
        assert all(answers[f"1/{n}"].finish == "length" and spans[f"1/{n}"] == {1} for n in range(3)), "what ran ends"
    else:
        asked = {f"{v}/{n}": v for v in (1, 2, 3) for n in range(5)}
        assert all(answers[name].finish == "length" for name in asked)
        assert {name: spans[name] for name in asked} == {name: {max(1, v - 1)} for name, v in asked.items()}


def ask(engine: Serving, version: int, count: int, length: int) -> None:
    for number in range(count):
        engine.submit(f"{version}/{number}", length)


def resume(engine: Serving, length: int) -> None:
    """As rollouts do: partial answers go on by prefix, as new requests."""
    for name, delta in engine.answers().items():
        if delta.finish == "aborted" and f"{name}+" not in engine.prompts:
            engine.submit(f"{name}+", length, np.concatenate([engine.prompts[name], delta.token_ids]))


# ---- what goes wrong on the way


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(publishing: Publish, serving: Serve, transport: str, kind: str) -> tuple[Publishing, Serving]:
    """A trainer, and an engine that decodes under its version 1."""
    trainer, engine = publishing(transport, kind), serving(kind)
    ask(engine, 1, 3, 4000)
    proved(engine, trainer, 1)
    engine.go_on(1)
    return trainer, engine


def refused(engine: Serving, manifest: Manifest, version: int, reason: str) -> Proof:
    """The engine refuses this, and serves on what it had."""
    proof = engine.load(manifest)
    assert not proof.accepted and not proof.quarantined
    assert re.search(reason, proof.reason), proof.reason
    assert engine.holds(version)
    engine.go_on(version)
    return proof


def goes_on(trainer: Publishing, engine: Serving, manifest: Manifest) -> None:
    """What was refused is sent again if it can be; the next version is proved, and all that was served is right."""
    again = trainer.publisher.resend(manifest).result(30)
    if manifest.kind == "delta":
        assert (again.kind, again.digest) == ("full", manifest.digest)
        assert engine.load(again).accepted and engine.holds(manifest.version)
    trainer.acknowledge(manifest.version)
    ends_well(trainer, engine, manifest.version + 1)


def ends_well(trainer: Publishing, engine: Serving, version: int) -> None:
    proved(engine, trainer, version)
    engine.go_on(version)
    engine.loop.abort().result(30)
    engine.check_answers()


def travelling(trainer: Publishing, manifest: Manifest) -> torch.Tensor:
    """The bytes at the manifest's location: a change to them is one that engines get."""
    entries = tuple(manifest.payload or manifest.entries)
    if trainer.sender.name == "file":
        return torch.from_numpy(np.memmap(manifest.location, np.uint8, "r+"))
    tensors = trainer.sender.snapshot(manifest.location, PackingPlan(entries=entries, nbytes=0, digest=0))
    return tensors[entries[-1].name].view(-1).view(torch.uint8)


def flip(travelling: torch.Tensor) -> None:
    travelling[-5] ^= 1
    if travelling.is_cuda:
        torch.cuda.synchronize()


def test_a_flipped_bit_is_caught_and_deliveries_go_on(pair: tuple[Publishing, Serving], kind: str) -> None:
    trainer, engine = pair
    manifest = trainer.publish(2)
    assert manifest.kind == kind
    flip(travelling(trainer, manifest))
    refused(engine, manifest, 1, "arrived wrong|checksum is wrong")
    goes_on(trainer, engine, manifest)


def lose(trainer: Publishing, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """One bucket of what travels is not there."""
    match trainer.sender:
        case ShmSender():
            whole = Path(manifest.location).read_bytes()
            cut = tmp_path / "headrace-cut-1-1"
            cut.write_bytes(whole[: len(whole) - BUCKET_BYTES // 2])
            return msgspec.structs.replace(manifest, location=str(cut))
        case FileSender():
            os.truncate(manifest.location, Path(manifest.location).stat().st_size - BUCKET_BYTES // 2)
        case TcpSender() as sender:
            real = sender.respond

            def cut_short(frames: list[bytes]) -> list[Any]:
                header, *payload = real(frames)
                return [header, *(bytes(part)[:-1] for part in payload)]

            monkeypatch.setattr(sender, "respond", cut_short)
        case CudaIpcSender():
            end = max(entry.offset + entry.nbytes for entry in manifest.payload or manifest.entries)
            check = cuda_ipc._Mapped.check

            def check_short(mapped: Any, version: int, nbytes: int = 0) -> None:
                whole, mapped.memory = mapped.memory, mapped.memory[: end - BUCKET_BYTES // 2]
                try:
                    check(mapped, version, nbytes)
                finally:
                    mapped.memory = whole

            monkeypatch.setattr(cuda_ipc._Mapped, "check", check_short)
        case NcclSender():
            monkeypatch.setattr(nccl, "pieces", lambda *arguments: nccl_group.pieces(*arguments)[:-1])
    return manifest


def test_a_lost_bucket_is_caught_and_deliveries_go_on(
    pair: tuple[Publishing, Serving], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = pair
    manifest = trainer.publish(2)
    with monkeypatch.context() as damage:
        short = lose(trainer, manifest, tmp_path, damage)
        refused(engine, short, 1, r"truncated|not asked for|nothing happened|broadcast|has \d+ bytes, not \d+")
    goes_on(trainer, engine, manifest)


def test_a_question_that_nobody_answers_is_given_up(
    publishing: Publish, serving: Serve, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer, engine = publishing("tcp", kind), serving(kind)
    monkeypatch.setattr(receiver, "source", lambda name, **options: TcpSource(patience=1.0))
    ask(engine, 1, 3, 4000)
    proved(engine, trainer, 1)
    manifest = trainer.publish(2)
    assert isinstance(trainer.sender, TcpSender)
    real, lost = trainer.sender.respond, []

    def forgetful(frames: list[bytes]) -> list[Any]:
        wanted = msgspec.msgpack.decode(frames[0], type=ReadRequest)
        if wanted.start and not lost:
            lost.append(wanted.start)
            return [msgspec.msgpack.encode(ReadReply(-1, 0, 0, 0, 0))]
        return real(frames)

    monkeypatch.setattr(trainer.sender, "respond", forgetful)
    refused(engine, manifest, 1, r"said nothing for")
    assert lost
    # The attempt after it asks for what is missing only.
    proof = engine.load(manifest)
    assert proof.accepted and engine.holds(2)
    trainer.acknowledge(2)
    ends_well(trainer, engine, 3)


def test_versions_come_in_order_or_not_at_all(pair: tuple[Publishing, Serving], kind: str) -> None:
    trainer, engine = pair
    second = proved(engine, trainer, 2)
    refused(engine, second, 2, "version 2 is out of order: version 2 is live")
    refused(engine, msgspec.structs.replace(second, version=1), 2, "version 1 is out of order")
    # A manifest that names another version than lies there.
    impostor = msgspec.structs.replace(second, version=7, kind="full" if kind == "delta" else kind, payload=None)
    refused(engine, impostor, 2, "version|released|bytes")
    # One that this engine never saw, as others did.
    trainer.publish(3)
    trainer.acknowledge(3)
    fourth = trainer.publish(4)
    if kind == "delta":
        assert (fourth.kind, fourth.base) == ("delta", 3)
        refused(engine, fourth, 2, "is a change to version 3, but this engine has version 2")
        fourth = trainer.publisher.resend(fourth).result(30)
        assert (fourth.kind, fourth.version) == ("full", 4)
    assert engine.load(fourth).accepted and engine.holds(4)
    trainer.acknowledge(4)
    ends_well(trainer, engine, 5)


def test_another_base_under_an_adapter_is_refused(publishing: Publish, serving: Serve, transport: str) -> None:
    trainer, stranger = publishing(transport, "adapter"), serving("adapter", base_seed=1)
    manifest = trainer.publish(1)
    proof = stranger.load(manifest)
    assert not proof.accepted and not proof.quarantined
    assert "version 1 is an adapter to weights with digest" in proof.reason
    stranger.submit("r", 4)
    assert stranger.loop.counters().version == -1 and not stranger.answers(), "nothing is served on another base"
    engine = serving("adapter")
    assert engine.load(manifest).accepted and engine.holds(1)


def test_live_weights_that_are_not_what_was_staged_are_never_served(
    pair: tuple[Publishing, Serving], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    trainer, engine = pair
    manifest = trainer.publish(2)

    def slipping(real: Callable[..., None]) -> Callable[..., None]:
        def copy(*arguments: Any, **options: Any) -> None:
            real(*arguments, **options)
            next(iter(engine.live.values())).view(-1)[0] += 1

        return copy

    with monkeypatch.context() as damage:
        # An engine on a GPU uses `copy_all` for staging, while it still decodes with the live weights.
        if next(iter(engine.live.values())).is_cuda:
            damage.setattr(DeviceCopies, "copy", slipping(DeviceCopies.copy))
        else:
            damage.setattr(receiver, "copy_all", slipping(receiver.copy_all))
        proof = engine.load(manifest)
    assert proof.quarantined and not proof.accepted
    assert "the live weights have digest" in proof.reason
    assert engine.loop.counters().version == -1
    trainer.acknowledge(2)
    third = trainer.publish(3)
    if kind == "delta":
        assert "unproved weights" in engine.load(third).reason
        third = trainer.publisher.resend(third).result(30)
    assert engine.load(third).accepted and engine.holds(3)
    engine.go_on(3)
    engine.loop.abort().result(30)
    engine.check_answers()
    assert all(versions_of(delta) <= {1, 3} for delta in engine.answers().values())
