"""The base that several processes hold once: found again, never changed by who holds it, and removed with the last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.config.schema import DeliveryConfig
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.setup import SHARED_BASE, clean
from headrace.delivery.shared_base import SharedBase, find_base, share_base
from headrace.delivery.transports.segments import HEADER_BYTES, segment_directories, sweep
from headrace.delivery.transports.shm import ShmSender
from headrace.errors import DeliveryError

WEIGHTS = make_weights(1)
DIGEST = digest(WEIGHTS.items())

HOLDER = """
import sys
from pathlib import Path
from bigram import make_weights
from headrace.delivery.digest import digest
from headrace.delivery.shared_base import share_base
weights = make_weights(1)
base = share_base(Path(sys.argv[1]), weights, "float32", digest(weights.items()))
print("held", flush=True)
sys.stdin.read()
"""


def run_dir(tmp_path: Path) -> Path:
    made = tmp_path / f"base-{os.getpid()}"
    made.mkdir()
    return made


def segments(directory: Path) -> list[Path]:
    return [path for place in segment_directories() for path in place.glob(f"headrace-{directory.name}-*")]


def found(directory: Path, seconds: float = 0.0) -> SharedBase:
    return find_base(directory, make_weights(1), "float32", DIGEST, seconds)


def test_trainer_and_engine_hold_one_segment(tmp_path: Path) -> None:
    directory = run_dir(tmp_path)
    trainer = share_base(directory, WEIGHTS, "float32", DIGEST)
    engine = found(directory)
    (segment,) = segments(directory)
    for base in (trainer, engine):
        assert all(torch.equal(base.weights[name], weight) for name, weight in WEIGHTS.items())
        assert base.digest() == DIGEST
    # What one process writes is its own. What is written to the segment is everybody's, and is noticed.
    trainer.weights["bias"].add_(1)
    assert trainer.digest() != DIGEST and engine.digest() == DIGEST
    with segment.open("r+b") as file:
        file.seek(HEADER_BYTES + 4)
        byte = file.read(1)[0]
        file.seek(HEADER_BYTES + 4)
        file.write(bytes([byte ^ 1]))
    assert engine.digest() != DIGEST
    with pytest.raises(DeliveryError, match=r"the shared base has digest .*, not"):
        found(directory)
    segment.unlink()


def hold(directory: Path) -> subprocess.Popen[str]:
    """A process that takes or writes the base, as a trainer does, and holds it."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_base_outlives_its_trainer_and_goes_with_its_last_holder(tmp_path: Path) -> None:
    directory = run_dir(tmp_path)
    first = hold(directory)
    (segment,) = segments(directory)
    sweep()
    assert segment.exists(), "its trainer is alive"
    second = hold(directory)
    assert segments(directory) == [segment], "a restarted trainer takes what is there"
    first.kill()
    first.communicate()
    sweep()
    assert segment.exists(), "somebody holds it"
    second.kill()
    second.communicate()
    assert segment.name in sweep() and not segment.exists()


def test_a_base_that_is_gone_is_written_again(tmp_path: Path) -> None:
    directory = run_dir(tmp_path)
    share_base(directory, WEIGHTS, "float32", DIGEST)
    (first,) = segments(directory)
    first.unlink()
    with pytest.raises(DeliveryError, match=r"there is no shared base after 0 s: segment .* cannot be opened"):
        found(directory)
    share_base(directory, WEIGHTS, "float32", DIGEST)
    (second,) = segments(directory)
    assert second != first and found(directory).digest() == DIGEST
    second.unlink()


def test_an_engine_waits_for_the_trainer_until_a_deadline(tmp_path: Path) -> None:
    directory = run_dir(tmp_path)
    with pytest.raises(DeliveryError, match=r"^there is no shared base after 0.1 s: the trainer has announced none$"):
        found(directory, 0.1)
    (directory / SHARED_BASE).write_text("{")
    with pytest.raises(DeliveryError, match="announced none"):
        found(directory)
    clean(DeliveryConfig(), directory)
    assert not (directory / SHARED_BASE).exists()


def test_other_weights_are_no_base(tmp_path: Path) -> None:
    directory = run_dir(tmp_path)
    share_base(directory, WEIGHTS, "float32", DIGEST)
    other = make_weights(2)
    with pytest.raises(DeliveryError, match=f"has digest {DIGEST:016x}, not {digest(other.items()):016x}"):
        find_base(directory, other, "float32", digest(other.items()), 0.0)
    (segment,) = segments(directory)
    segment.unlink()


def test_the_base_is_digested_at_every_delivery() -> None:
    base = make_weights(7)
    wanted = digest(base.items())
    live = make_weights(0)
    publisher = Publisher(ShmSender("base-test"), "float32", 1e-5, CANARY, send="adapter", base_digest=wanted)
    receiver = Receiver(live, "engine-0", base_digest=lambda: digest(base.items()))
    try:
        for version in (1, 2):
            weights = make_weights(version)
            manifest = publisher.publish(
                version, version - 1, version, weights, lambda ids, weights=weights: score(weights, ids)
            ).result(30)
            if version == 2:
                base["bias"][0] += 1
                with pytest.raises(DeliveryError, match=f"weights with digest {wanted:016x}, but this engine's have"):
                    receiver.stage(manifest)
                assert receiver.version == 1
                base["bias"].copy_(make_weights(7)["bias"])
            proof = receiver.swap(receiver.stage(manifest), lambda ids: score(live, ids).astype(np.float32))
            assert proof.accepted and receiver.version == version, proof.reason
            publisher.acknowledged(version)
    finally:
        receiver.close()
        publisher.close()
