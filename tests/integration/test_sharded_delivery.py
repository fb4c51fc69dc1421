"""Ranks publish what they own, and receivers put together what they want, to the bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from rank_cases import RESEND, model_dir, publish, publish_deltas, read_tensors, start_ranks

from headrace.channel.codec import decode
from headrace.delivery.base import Manifest
from headrace.delivery.receiver import Receiver
from headrace.errors import DeliveryError, WrongBase
from headrace.models.loading import load_model, named_weights

pytestmark = pytest.mark.slow


@contextmanager
def published(path: Path, ranks: int, tensor_parallel: int, transport: str = "shm") -> Iterator[tuple]:
    """A manifest whose parts stay readable inside, the path of the model, and the weights as the trainer has them."""
    model_path = model_dir(path / "model", "qwen3")
    processes = multiprocessing.get_context("forkserver")
    told, done = processes.Queue(), processes.Event()
    (path / "ranks").mkdir()
    started = start_ranks(path / "ranks", ranks, tensor_parallel, publish, model_path, transport, told, done)
    try:
        manifest = decode(Manifest, told.get(timeout=200))
        yield manifest, model_path, read_tensors(path / "ranks" / "rank-0.tensors")["weights"]
    finally:
        done.set()
        for process in started:
            process.join(timeout=60)
        codes = [process.exitcode for process in started]
        for process in started:
            process.kill()
    assert codes == [0] * ranks
    assert not list((path / "ranks").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "transport"),
    [(2, 1, "shm"), (2, 2, "tcp"), (4, 2, "shm"), (2, 1, "file"), (4, 2, "nccl")],
)
def test_ranks_to_one_engine(tmp_path, ranks, tensor_parallel, transport):
    with published(tmp_path, ranks, tensor_parallel, transport) as (manifest, model_path, expected):
        assert manifest.location == ""
        assert len(manifest.parts) == ranks
        sizes = [sum(entry.nbytes for entry in part.entries) for part in manifest.parts]
        assert sum(sizes) == sum(entry.nbytes for entry in manifest.entries)
        assert max(sizes) < 0.6 * sum(sizes)
        for staging in ("device", "none"):
            live = named_weights(load_model(model_path))
            receiver = Receiver(live, "engine-0", staging=staging)
            proof = receiver.swap(receiver.stage(manifest), lambda tokens: manifest.canary.logprobs)
            assert proof.accepted, proof.reason
            assert receiver.version == 3
            for name, tensor in expected.items():
                assert torch.equal(live[name], tensor.float()), name
            receiver.close()


@pytest.mark.parametrize(
    ("ranks", "tensor_parallel", "transport"), [(2, 1, "shm"), (4, 2, "tcp"), (2, 2, "file"), (2, 1, "nccl")]
)
def test_deltas_of_ranks_are_the_whole_weights(tmp_path, ranks, tensor_parallel, transport):
    """One engine takes every delta, the other one misses the first version and is sent the second one whole."""
    model_path = model_dir(tmp_path / "model", "qwen3")
    processes = multiprocessing.get_context("forkserver")
    told, heard = processes.Queue(), [processes.Queue() for _ in range(ranks)]
    (tmp_path / "ranks").mkdir()
    started = start_ranks(
        tmp_path / "ranks", ranks, tensor_parallel, publish_deltas, model_path, transport, told, heard
    )
    lives = [named_weights(load_model(model_path)) for _ in range(2)]
    steady, late = (Receiver(live, f"engine-{number}") for number, live in enumerate(lives))

    def load(receiver: Receiver, manifest: Manifest) -> None:
        proof = receiver.load(manifest, lambda tokens: manifest.canary.logprobs)
        assert proof.accepted, proof.reason

    def heard_by_all(version: int) -> None:
        for one in heard:
            one.put(version)

    first = decode(Manifest, told.get(timeout=200))
    assert first.kind == "full"
    load(steady, first)
    heard_by_all(1)
    second = decode(Manifest, told.get(timeout=200))
    assert (second.kind, second.base, len(second.parts)) == ("delta", 1, ranks)
    assert all(sum(e.nbytes for e in part.payload) < sum(e.nbytes for e in part.entries) for part in second.parts)
    load(steady, second)
    with pytest.raises(WrongBase, match="is a change to version 1"):
        late.stage(second)
    heard_by_all(RESEND)
    again = decode(Manifest, told.get(timeout=200))
    assert (again.kind, again.digest) == ("full", second.digest)
    load(late, again)
    assert all(torch.equal(lives[0][name], tensor) for name, tensor in lives[1].items())
    heard_by_all(2)
    third = decode(Manifest, told.get(timeout=200))
    assert (third.kind, third.base) == ("delta", 2)
    for receiver in (steady, late):
        load(receiver, third)
    assert all(torch.equal(lives[0][name], tensor) for name, tensor in lives[1].items())
    heard_by_all(3)
    for receiver in (steady, late):
        receiver.close()
    for process in started:
        process.join(timeout=120)
    assert [process.exitcode for process in started] == [0] * ranks


def test_what_is_missing_torn_or_wrong_is_rejected(tmp_path):
    with published(tmp_path, 2, 1) as (manifest, model_path, _):
        live = named_weights(load_model(model_path))
        before = {name: tensor.clone() for name, tensor in live.items()}
        receiver = Receiver(live, "engine-0")
        lost = msgspec.structs.replace(manifest, parts=manifest.parts[1:])
        with pytest.raises(DeliveryError, match="is incomplete: "):
            receiver.stage(lost)
        twice = msgspec.structs.replace(manifest, parts=[*manifest.parts, manifest.parts[0]])
        with pytest.raises(DeliveryError, match="is held twice"):
            receiver.stage(twice)
        exchanged = [
            msgspec.structs.replace(part, location=other.location)
            for part, other in zip(manifest.parts, reversed(manifest.parts), strict=True)
        ]
        with pytest.raises(DeliveryError, match=r"arrived wrong|truncated"):
            receiver.stage(msgspec.structs.replace(manifest, parts=exchanged))
        path = Path(manifest.parts[1].location)
        with path.open("r+b") as file:
            file.seek(-8, 2)
            byte = file.read(1)
            file.seek(-8, 2)
            file.write(bytes([byte[0] ^ 1]))
        with pytest.raises(DeliveryError, match="arrived wrong"):
            receiver.stage(manifest)
        assert all(torch.equal(live[name], tensor) for name, tensor in before.items())
        assert np.isfinite(manifest.canary.logprobs).all()
        receiver.close()
