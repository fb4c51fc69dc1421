import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.channel.codec import encode
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.segments import HEADER_BYTES, segment_directories, sweep
from headrace.delivery.transports.shm import ShmSender

RUN_ID = f"processes-test-{os.getpid()}"


def leftovers() -> list[str]:
    return [path.name for directory in segment_directories() for path in directory.glob(f"headrace-{RUN_ID}-*")]


class Process:
    """A script beside this file, spoken to line by line."""

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def load(self, manifest: Manifest) -> tuple[Proof, torch.Tensor]:
        assert self._process.stdin is not None
        frames = [base64.b64encode(frame).decode() for frame in encode(manifest)]
        self._process.stdin.write(json.dumps(frames) + "\n")
        self._process.stdin.flush()
        proof, logits = msgspec.json.decode(self.read(), type=tuple[Proof, list[float]])
        return proof, torch.tensor(logits)

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> int:
        self._process.communicate(timeout=30)
        return self._process.returncode


@pytest.fixture
def engine() -> Iterator[Process]:
    process = Process("engine_process.py")
    yield process
    process.kill()


def publish(publisher: Publisher, version: int) -> Manifest:
    weights = make_weights(version)
    return publisher.publish(version, version - 1, version, weights, lambda ids: score(weights, ids)).result(30)


def test_versions_are_proved_in_another_process_and_nothing_is_left(engine: Process):
    publisher = Publisher(ShmSender(RUN_ID), "float32", 1e-5, CANARY, deadline=5.0)
    locations = set()
    for version in (1, 2, 3, 4):
        manifest = publish(publisher, version)
        proof, logits = engine.load(manifest)
        assert proof.accepted, proof.reason
        assert proof.live_digest == proof.staged_digest == manifest.digest
        assert torch.equal(logits, make_weights(version)["logits"].flatten())
        publisher.acknowledged(version)
        locations.add(manifest.location)

    corrupt = publish(publisher, 5)
    with Path(corrupt.location).open("r+b") as segment:
        segment.seek(HEADER_BYTES + corrupt.entries[0].offset)
        segment.write(b"\x01")
    proof, logits = engine.load(corrupt)
    assert not proof.accepted
    assert not proof.quarantined
    assert "version 5 arrived wrong" in proof.reason
    assert torch.equal(logits, make_weights(4)["logits"].flatten())

    assert engine.load(publish(publisher, 6))[0].accepted
    publisher.close()
    assert engine.load(corrupt)[0].reason.startswith("version 5 is out of order")
    assert engine.end() == 0
    assert leftovers() == []
    assert len(locations) <= 2


def test_what_a_killed_trainer_leaves_is_swept():
    trainer = Process("trainer_process.py", RUN_ID)
    location = Path(trainer.read())
    sweep()
    assert location.exists()
    trainer.kill()
    assert leftovers() == [location.name]
    sweep()
    assert leftovers() == []
