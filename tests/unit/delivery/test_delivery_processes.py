"""Trainer and engines in processes of their own: what is proved, what is rejected, what is left, on every transport."""

import base64
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import engine_process
import msgspec
import pytest
import torch
import trainer_process
from bigram import CANARY, make_weights, score

from forked_processes import PROCESSES
from headrace.channel.codec import decode, encode
from headrace.delivery import transports
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.plan import PackingPlan
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.base import Sender, SenderSettings
from headrace.delivery.transports.file import layout_of
from headrace.delivery.transports.segments import HEADER_BYTES, segment_directories, sweep
from headrace.delivery.transports.storage import sweep_storage

RUN_ID = f"processes-test-{os.getpid()}"


def leftovers() -> list[str]:
    return [path.name for directory in segment_directories() for path in directory.glob(f"headrace-{RUN_ID}-*")]


class Process:
    """`serve` of a module beside this file in a process of its own, spoken to over a pipe."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self._line, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def read(self) -> bytes:
        return self._line.recv_bytes()

    def load(self, manifest: Manifest) -> tuple[Proof, torch.Tensor]:
        frames = [base64.b64encode(frame).decode() for frame in encode(manifest)]
        self._line.send_bytes(json.dumps(frames).encode())
        proof, logits = msgspec.json.decode(self.read(), type=tuple[Proof, list[float]])
        return proof, torch.tensor(logits)

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> int | None:
        self._line.close()
        self._process.join(30)
        return self._process.exitcode


@pytest.fixture
def engine() -> Iterator[Process]:
    process = Process(engine_process.serve)
    yield process
    process.kill()


def publish(publisher: Publisher, version: int) -> Manifest:
    weights = make_weights(version)
    return publisher.publish(version, version - 1, version, weights, lambda ids: score(weights, ids)).result(30)


@pytest.fixture(params=transports.WITHOUT_GPU)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


def flip_a_bit(sender: Sender, manifest: Manifest) -> None:
    """In the bytes that engines will get."""
    plan = PackingPlan(entries=tuple(manifest.entries), nbytes=0, digest=manifest.plan_digest)
    entries = manifest.entries
    match sender.name:
        case "shm":
            path, offset = Path(manifest.location), HEADER_BYTES + entries[0].offset
        case "file":
            layout = layout_of(manifest.version, entries)
            path, offset = Path(manifest.location), layout.entries[1].offset
        case _:
            sender.snapshot(manifest.location, plan)["bias"].view(torch.int32)[0] ^= 1
            return
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_versions_are_proved_in_another_process_and_nothing_is_left(transport: str, engine: Process, tmp_path: Path):
    sender = transports.sender(transport, SenderSettings(run_id=RUN_ID, directory=tmp_path / "weights"))
    publisher = Publisher(sender, "float32", 1e-5, CANARY, deadline=5.0)
    for version in (1, 2, 3, 4):
        manifest = publish(publisher, version)
        proof, logits = engine.load(manifest)
        assert proof.accepted, proof.reason
        assert proof.live_digest == proof.staged_digest == manifest.digest
        assert torch.equal(logits, make_weights(version)["logits"].flatten())
        publisher.acknowledged(version)

    corrupt = publish(publisher, 5)
    flip_a_bit(sender, corrupt)
    proof, logits = engine.load(corrupt)
    assert not proof.accepted
    assert not proof.quarantined
    assert "version 5 arrived wrong" in proof.reason
    assert torch.equal(logits, make_weights(4)["logits"].flatten())

    sixth = publish(publisher, 6)
    assert engine.load(sixth)[0].accepted
    publisher.close()
    assert engine.load(corrupt)[0].reason.startswith("version 5 is out of order")
    gone = msgspec.structs.replace(sixth, version=7)
    proof, logits = engine.load(gone)
    assert not proof.accepted and not proof.quarantined
    assert torch.equal(logits, make_weights(6)["logits"].flatten())
    assert engine.end() == 0
    assert leftovers() == []
    assert list(tmp_path.iterdir()) == []


def test_one_engine_that_dies_does_not_disturb_another(transport: str, engine: Process, tmp_path: Path):
    publisher = Publisher(
        transports.sender(transport, SenderSettings(run_id=RUN_ID, directory=tmp_path)), "float32", 1e-5, CANARY
    )
    victim = Process(engine_process.serve)
    manifest = publish(publisher, 1)
    assert victim.load(manifest)[0].accepted
    victim.kill()
    assert engine.load(manifest)[0].accepted
    publisher.acknowledged(1)
    assert engine.load(publish(publisher, 2))[0].accepted
    publisher.close()


def test_what_a_killed_trainer_leaves_is_rejected_or_whole_and_gone_at_the_next_start(
    transport: str, engine: Process, tmp_path: Path
):
    directory = tmp_path / "weights"
    trainer = Process(trainer_process.serve, transport, RUN_ID, str(directory))
    manifest = decode(Manifest, [base64.b64decode(frame) for frame in json.loads(trainer.read())])
    sweep()
    sweep_storage(directory, "")
    assert engine.load(manifest)[0].accepted
    trainer.kill()
    proof, logits = engine.load(msgspec.structs.replace(manifest, version=2))
    assert not proof.accepted and not proof.quarantined
    assert torch.equal(logits, make_weights(1)["logits"].flatten())
    assert len(leftovers()) == (transport == "shm")
    assert directory.exists() == (transport == "file")
    (directory.exists() and (directory / "version-00000002.safetensors.partial").write_bytes(b"half"))
    sweep()
    again = transports.sender(transport, SenderSettings(run_id=RUN_ID, directory=directory))
    assert leftovers() == []
    assert [path.name for path in directory.glob("*.safetensors*")] == []
    again.close()
    assert list(tmp_path.iterdir()) == []


def test_a_url_reaches_another_process_and_what_a_killed_trainer_leaves_is_swept(engine: Process, tmp_path: Path):
    url = f"file://{tmp_path}/weights"
    trainer = Process(trainer_process.serve, "file", RUN_ID, url)
    manifest = decode(Manifest, [base64.b64decode(frame) for frame in json.loads(trainer.read())])
    assert manifest.location == f"{url}/version-00000001.safetensors"
    proof, logits = engine.load(manifest)
    assert proof.accepted, proof.reason
    assert proof.live_digest == manifest.digest
    assert torch.equal(logits, make_weights(1)["logits"].flatten())
    trainer.kill()
    proof, logits = engine.load(msgspec.structs.replace(manifest, version=2))
    assert "holds version 1, not 2" in proof.reason
    assert torch.equal(logits, make_weights(1)["logits"].flatten())
    (tmp_path / "weights" / "version-00000002.safetensors.partial").write_bytes(b"half")
    assert not sweep_storage(url, "another run")
    assert sweep_storage(url, RUN_ID)
    assert list(tmp_path.iterdir()) == []

    sender = transports.sender("file", SenderSettings(run_id=RUN_ID, directory=url))
    publisher = Publisher(sender, "float32", 1e-5, CANARY, deadline=5.0)
    corrupt = publish(publisher, 3)
    path = Path(corrupt.location.removeprefix("file://"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    proof, logits = engine.load(corrupt)
    assert not proof.quarantined
    assert "version 3 arrived wrong" in proof.reason
    assert torch.equal(logits, make_weights(1)["logits"].flatten())
    assert engine.load(publish(publisher, 4))[0].accepted
    publisher.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("transport", "reason"), [("tcp", "is gone"), ("nccl", "the broadcast from")])
def test_a_trainer_that_dies_in_the_middle_of_a_transfer(engine: Process, tmp_path: Path, transport: str, reason: str):
    healthy = Publisher(transports.sender(transport, SenderSettings(run_id=RUN_ID)), "float32", 1e-5, CANARY)
    assert engine.load(publish(healthy, 0))[0].accepted
    trainer = Process(trainer_process.serve, transport, RUN_ID, str(tmp_path), 3)
    manifest = decode(Manifest, [base64.b64decode(frame) for frame in json.loads(trainer.read())])
    started = time.monotonic()
    proof, logits = engine.load(manifest)
    assert time.monotonic() - started < 30
    assert not proof.accepted and not proof.quarantined
    assert reason in proof.reason
    assert torch.equal(logits, make_weights(0)["logits"].flatten())
    assert trainer.end() == -signal.SIGKILL
    assert engine.load(publish(healthy, 2))[0].accepted
    healthy.close()
