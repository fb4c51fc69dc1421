"""kill -9 at every step of a delivery: who is left serves one whole version, and the next one is delivered.

Every step on every transport; the kind changes from case to case so that each also meets each step and each transport.
`tests/gpu/test_delivery_deaths_on_gpu.py` is the same for trainers and engines on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from delivery_parts import BUCKET_BYTES, KINDS, Holding, Publishing, Serving, watch_copies
from delivery_zygote import Child, reading

from headrace.channel.codec import decode
from headrace.delivery import receiver
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.transports import WITHOUT_GPU, file, tcp
from headrace.delivery.transports.cuda_ipc import CudaIpcSource
from headrace.delivery.transports.nccl_group import NcclSource
from headrace.delivery.transports.segments import segment_directories, sweep
from headrace.delivery.transports.shm import ShmSource
from headrace.delivery.transports.storage import sweep_storage
from headrace.delivery.transports.tcp_server import TcpSender

pytestmark = pytest.mark.slow

RUN_ID = f"deaths-{os.getpid()}"
TRANSPORTS = WITHOUT_GPU
DEVICE = "cpu"
ENGINE_STEPS = ("mid-fetch", "after stage", "mid-swap", "before acknowledge")
TRAINER_STEPS = ("before write", "mid-write", "before announce", "after announce", "mid-fetch", "before acknowledge")

Fork = Callable[..., Child]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, steps in (("engine_step", ENGINE_STEPS), ("trainer_step", TRAINER_STEPS)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(("transport", name, "kind"), cases(metafunc.module.TRANSPORTS, steps))
    if "one_copy_by" in metafunc.fixturenames:
        # A broadcast needs memory of its own on every engine.
        metafunc.parametrize("one_copy_by", [name for name in metafunc.module.TRANSPORTS if name != "nccl"])


def cases(transports: tuple[str, ...], steps: tuple[str, ...]) -> list[tuple[str, str, str]]:
    return [
        (transport, step, KINDS[(row + column) % 3])
        for row, transport in enumerate(transports)
        for column, step in enumerate(steps)
    ]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return str(request.module.DEVICE)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Any]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("delivery_zygote.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # The last: who asks whether there is a GPU must leave it to the forks.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
    )
    yield process
    process.communicate(timeout=30)


@pytest.fixture
def fork(zygote: Any, tmp_path: Path) -> Iterator[Fork]:
    context: zmq.Context[Any] = zmq.Context()
    made: list[Child] = []

    def make(*arguments: str) -> Child:
        made.append(Child(zygote, context, Path(tempfile.mkdtemp(dir=tmp_path)), *arguments))
        return made[-1]

    yield make
    for child in made:
        child.close()
    context.term()


@pytest.fixture(autouse=True)
def small_buckets_and_short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    real = receiver.source
    monkeypatch.setattr(tcp, "BUCKET_BYTES", BUCKET_BYTES)
    monkeypatch.setattr(
        receiver, "source", lambda name, **o: NcclSource(patience=5.0) if name == "nccl" else real(name, **o)
    )


def leftovers(directory: Path) -> list[str]:
    segments = [path.name for place in segment_directories() for path in place.glob(f"headrace-{RUN_ID}-*")]
    return segments + [path.name for path in directory.glob("*")]


def test_an_engine_killed_in_a_delivery(
    fork: Fork, tmp_path: Path, device: str, transport: str, engine_step: str, kind: str
) -> None:
    directory = tmp_path / "weights"
    trainer = Publishing(transport, kind, RUN_ID, directory, device=device)
    try:
        victim = fork("engine", transport, kind, device)
        assert victim.loaded(trainer.publish(1))[0].accepted
        trainer.acknowledge(1)
        second = trainer.publish(2)
        assert second.kind == kind
        victim.tell(f"load|{engine_step}", second)
        victim.await_death()

        # Another takes its place: it gets the current version, whole, before it serves anything.
        engine = fork("engine", transport, kind, device)
        proof, holds = engine.loaded(second)
        if kind == "delta":
            assert "is a change to version" in proof.reason and "unproved weights" not in proof.reason
            proof, holds = engine.loaded(trainer.publisher.resend(second).result(30))
        elif transport == "nccl" and not proof.accepted:
            # The broadcast that the victim was in may still be failing.
            proof, holds = engine.loaded(second)
        assert proof.accepted and holds, proof.reason
        trainer.acknowledge(2)
        third = trainer.publish(3)
        assert third.kind == kind
        proof, holds = engine.loaded(third)
        assert proof.accepted and holds and proof.live_digest == third.digest, proof.reason
        engine.tell("check")
        served = json.loads(engine.hear()[0])
        assert set(served) <= {2, 3} and 3 in served
    finally:
        trainer.close()
    assert leftovers(directory) == []


def test_a_trainer_killed_in_a_delivery(
    fork: Fork,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    transport: str,
    trainer_step: str,
    kind: str,
) -> None:
    directory = tmp_path / "weights"
    engine = Serving(kind, device=device)
    try:
        engine.submit("r", 4000)
        victim = fork("trainer", transport, kind, RUN_ID, str(directory), device)
        assert engine.load(victim.published(1)).accepted
        victim.tell("acknowledge|1")
        proof = killed_at(trainer_step, victim, engine, transport, monkeypatch)
        version = 2 if proof is not None and proof.accepted else 1
        assert proof is None or not proof.quarantined
        assert engine.holds(version), "all of one version"
        engine.go_on(version)

        # The next start: what is left goes, and versions go on with the next free id.
        sweep()
        sweep_storage(directory, "")
        assert leftovers(directory) == []
        trainer = fork("trainer", transport, kind, RUN_ID, str(directory), device)
        for version in (3, 4):
            manifest = trainer.published(version)
            assert manifest.kind == ("full" if kind == "delta" and version == 3 else kind)
            proof = engine.load(manifest)
            assert proof.accepted and engine.holds(version), proof.reason
            trainer.tell(f"acknowledge|{version}")
            engine.go_on(version)
        engine.loop.abort().result(30)
        engine.check_answers()
        trainer.tell("close")
        trainer.hear()
    finally:
        engine.stop()
    assert leftovers(directory) == []


def test_a_trainer_killed_while_its_weights_are_copied_over_the_live_ones(
    fork: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, one_copy_by: str
) -> None:
    transport = one_copy_by
    monkeypatch.setattr(receiver, "BUCKET_BYTES", 4 * BUCKET_BYTES)
    directory = tmp_path / "weights"
    engine = Serving("full", device=device, staging="none")
    try:
        engine.submit("r", 4000)
        victim = fork("trainer", transport, "full", RUN_ID, str(directory), device)
        assert engine.load(victim.published(1)).accepted
        victim.tell("acknowledge|1")
        engine.go_on(1)
        manifest = victim.published(2)
        watch_copies(monkeypatch, transport, device, victim.kill)
        proof = engine.load(manifest)
        victim.await_death(0)
        if transport == "tcp":
            # The rest cannot be fetched, so there is neither version 1 nor version 2.
            assert not proof.accepted and proof.quarantined and "is gone" in proof.reason
            partial = engine.wait(lambda found: found["r"].finish is not None)["r"]
            assert partial.finish == "aborted" and set(partial.versions.tolist()) == {1}
        else:
            assert proof.accepted and engine.holds(2), "its bytes outlive it"
        sweep()
        sweep_storage(directory, "")
        trainer = fork("trainer", transport, "full", RUN_ID, str(directory), device)
        proof = engine.load(trainer.published(3))
        assert proof.accepted and engine.holds(3), proof.reason
        engine.loop.abort().result(30)
        engine.check_answers()
        trainer.tell("close")
        trainer.hear()
    finally:
        engine.stop()
    assert leftovers(directory) == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_killed_while_it_hands_weights_on(fork: Fork, tmp_path: Path, kind: str) -> None:
    trainer = Publishing("tcp", kind, RUN_ID, tmp_path, receivers=7)
    others = [Holding(kind, "second"), Holding(kind, "third")]
    try:
        victim = fork("engine", "tcp", kind, "cpu")
        manifest = trainer.publish(1)
        victim.tell("load|mid-relay", manifest)
        assert victim.hear()[1] == b"bit for bit"
        for engine in others:
            assert engine.load(manifest).accepted and engine.holds(1)
        victim.await_death()
        assert isinstance(trainer.sender, TcpSender)
        copies = trainer.sender.sent_bytes / max(entry.offset + entry.nbytes for entry in manifest.entries)
        assert 2 < copies < 3, "the third had some of it from the victim"
    finally:
        for engine in others:
            engine.stop()
        trainer.close()


def killed_at(
    step: str, victim: Child, engine: Serving, transport: str, monkeypatch: pytest.MonkeyPatch
) -> Proof | None:
    """What the engine said to version 2, if it heard of it."""
    if step in ("before write", "mid-write", "before announce"):
        victim.tell(f"publish|2|{step}")
        victim.await_death()
        return None
    if step == "mid-fetch" and transport in ("tcp", "nccl"):
        victim.tell("publish|2|mid-fetch")
        return refused(engine.load(decode(Manifest, victim.hear())))
    manifest = victim.published(2)
    if step == "mid-fetch":
        kill_while_read(victim, transport, monkeypatch)
        proof = engine.load(manifest)
        victim.await_death(0)
        return proof
    if step == "after announce":
        victim.kill()
        proof = engine.load(manifest)
        return refused(proof) if transport in ("tcp", "nccl", "cuda_ipc") else proof
    proof = engine.load(manifest)
    assert proof.accepted
    victim.kill()
    return proof


def refused(proof: Proof) -> Proof:
    assert not proof.accepted and not proof.quarantined
    return proof


def kill_while_read(victim: Child, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while the engine is half through; the bytes of `shm` and `file` outlive it, a GPU's do not."""
    source: Any = {"shm": ShmSource, "cuda_ipc": CudaIpcSource}.get(transport)
    if source is not None:
        verify = source.verify
        monkeypatch.setattr(source, "verify", lambda *a: (victim.kill(), verify(*a)))
    else:
        monkeypatch.setattr(file, "opened", reading(file.opened, then=victim.kill))
