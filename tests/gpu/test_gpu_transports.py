"""Transports between processes on the GPU: bit-identical, in order, proved; what is torn or dead is rejected."""

import base64
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transport_engine import plain_sum

from headrace.channel.codec import encode
from headrace.delivery import kernels
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.kernels import DeviceCopy, DeviceDigest
from headrace.delivery.plan import plan_weights
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import cuda_ipc
from headrace.delivery.transports.base import Sender
from headrace.delivery.transports.cuda_ipc import CudaIpcSender, CudaIpcSource, allocate
from headrace.delivery.transports.nccl import NcclSender
from headrace.delivery.transports.segments import segment_directories, sweep
from headrace.errors import DeliveryError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RUN_ID = f"gpu-transports-{os.getpid()}"
CANARY = np.array([3, 1, 4, 1, 5], np.int32)
SMALL = {"a": (1000, 333), "b": (77,), "c": (64, 1024)}
SLEEP_CYCLES = 400_000_000
"""About a quarter of a second."""


def qwen3_shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of Qwen3-0.6B: 596 million, in 310 tensors."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (151936, 1024), "norm": (1024,)}
    for layer in range(28):
        for name, shape in {
            "q_proj": (2048, 1024),
            "k_proj": (1024, 1024),
            "v_proj": (1024, 1024),
            "o_proj": (1024, 2048),
            "gate_proj": (3072, 1024),
            "up_proj": (3072, 1024),
            "down_proj": (1024, 3072),
            "q_norm": (128,),
            "k_norm": (128,),
            "input_layernorm": (1024,),
            "post_attention_layernorm": (1024,),
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
    return shapes


def make_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Master weights: float32 on the GPU, cast when they are published."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, device="cuda") for name, shape in shapes.items()}


def served(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def leftovers() -> list[str]:
    return [path.name for directory in segment_directories() for path in directory.glob(f"headrace-{RUN_ID}-*")]


class Engine:
    """`transport_engine.py`, spoken to line by line."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], host_id: str = "engine") -> None:
        # Two NCCL ranks on one GPU are refused unless they seem to be on two hosts.
        environment = os.environ | {"NCCL_HOSTID": f"headrace-{host_id}"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("transport_engine.py")), json.dumps(shapes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def send(self, manifest: Manifest) -> None:
        assert self.process.stdin is not None
        frames = [base64.b64encode(frame).decode() for frame in encode(manifest)]
        self.process.stdin.write(json.dumps(frames) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[Proof, int]:
        proof, total = self.read()
        return msgspec.convert(proof, Proof), total

    def load(self, manifest: Manifest) -> tuple[Proof, int]:
        self.send(manifest)
        return self.answer()

    def end(self) -> None:
        self.process.communicate(timeout=30)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine(SMALL)
    assert made.read() == "ready"
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "headrace-trainer")


def make_sender(transport: str, **options: Any) -> Sender:
    if transport == "cuda_ipc":
        return CudaIpcSender(RUN_ID)
    return NcclSender(device="cuda", patience=20.0, **options)


def begin(publisher: Publisher, version: int, weights: dict[str, torch.Tensor]) -> Future[Manifest]:
    scored = np.zeros(len(CANARY) - 1, np.float32)
    return publisher.publish(version, version - 1, version, weights, lambda ids: scored)


def publish(publisher: Publisher, version: int, weights: dict[str, torch.Tensor]) -> Manifest:
    return begin(publisher, version, weights).result(60)


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_versions_are_proved_bit_for_bit_and_a_flipped_bit_is_not(transport: str, engine: Engine):
    sender = make_sender(transport)
    publisher = Publisher(sender, "bfloat16", 1e-5, CANARY, deadline=20.0)
    for version in range(1, 5):
        weights = make_weights(SMALL, version)
        wanted = plain_sum(served(weights))
        # Behind work on the trainer's stream, and changed right after: what counts is the order on the GPU.
        torch.cuda._sleep(SLEEP_CYCLES)
        published = begin(publisher, version, weights)
        for tensor in weights.values():
            tensor.zero_()
        manifest = published.result(60)
        proof, total = engine.load(manifest)
        assert proof.accepted, proof.reason
        assert proof.live_digest == proof.staged_digest == manifest.digest
        assert total == wanted
        publisher.acknowledged(version)

    manifest = publish(publisher, 5, make_weights(SMALL, 5))
    plan = plan_weights(make_weights(SMALL, 5), "bfloat16")
    sender.snapshot(manifest.location, plan)["b"].view(torch.int16)[3] ^= 1
    torch.cuda.synchronize()
    proof, total = engine.load(manifest)
    assert not proof.accepted and not proof.quarantined
    assert "version 5 arrived wrong" in proof.reason
    assert total == wanted
    torn = msgspec.structs.replace(manifest, version=6)
    assert "holds version 5, not 6" in engine.load(torn)[0].reason
    seventh = make_weights(SMALL, 7)
    proof, total = engine.load(publish(publisher, 7, seventh))
    assert proof.accepted, proof.reason
    assert total == plain_sum(served(seventh))
    publisher.close()
    assert not engine.load(msgspec.structs.replace(manifest, version=8))[0].accepted
    engine.end()
    assert leftovers() == []


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_an_engine_that_is_killed_leaves_trainer_and_others_alone(transport: str, engine: Engine):
    publisher = Publisher(make_sender(transport), "bfloat16", 1e-5, CANARY, deadline=20.0)
    victim = Engine(SMALL, "victim")
    assert victim.read() == "ready"
    weights = make_weights(SMALL, 1)
    manifest = publish(publisher, 1, weights)
    assert victim.load(manifest)[0].accepted
    victim.kill()
    proof, total = engine.load(manifest)
    assert proof.accepted, proof.reason
    assert total == plain_sum(served(weights))
    publisher.acknowledged(1)
    assert engine.load(publish(publisher, 2, weights))[0].accepted
    publisher.close()


TRAINER = """
import sys, torch
from headrace.delivery.plan import plan_weights
from headrace.delivery.transports.cuda_ipc import CudaIpcSender
weights = {"w": torch.arange(1 << 20, device="cuda", dtype=torch.float32)}
sender = CudaIpcSender(sys.argv[1])
print(sender.write(1, plan_weights(weights, "float32"), weights), flush=True)
sys.stdin.read()
"""


def test_a_trainer_that_is_killed_takes_its_buffers_along():
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, RUN_ID], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    location = trainer.stdout.readline().strip()
    wanted = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    plan = plan_weights({"w": wanted}, "float32")
    opened, late = CudaIpcSource(), CudaIpcSource()
    assert torch.equal(opened.open(location, 1, plan.entries)["w"], wanted)
    opened.verify(location, 1)
    trainer.kill()
    trainer.communicate()
    for source in (opened, late):
        with pytest.raises(DeliveryError, match="is dead"):
            source.open(location, 1, plan.entries)
        source.close()
    assert len(leftovers()) == 2
    sweep()
    assert leftovers() == []


def test_both_ends_may_be_in_one_process_and_buffers_are_reused_and_freed():
    before = torch.cuda.mem_get_info()[0]
    sender, source = CudaIpcSender(RUN_ID), CudaIpcSource()
    locations = set()
    for version in range(1, 7):
        weights = make_weights({"w": (8192, 8192)}, version)
        plan = plan_weights(weights, "float32")
        location = sender.write(version, plan, weights)
        locations.add(location)
        assert torch.equal(source.open(location, version, plan.entries)["w"], weights["w"])
        source.verify(location, version)
        if version > 1:
            sender.release(location)
    assert len(locations) == 2
    with pytest.raises(DeliveryError, match="holds version 6, not 5"):
        source.verify(location, 5)
    sender.close()
    with pytest.raises(DeliveryError, match="removed"):
        source.verify(location, 6)
    source.close()
    del weights, sender, source
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 256 << 20


def test_the_second_buffer_is_known_from_the_first_version_on():
    sender, source = CudaIpcSender(RUN_ID), CudaIpcSource()
    weights = [make_weights({"w": (4096, 1024)}, version) for version in (1, 2)]
    plan = plan_weights(weights[0], "float32")
    first = source.open(sender.write(1, plan, weights[0]), 1, plan.entries)
    (later,) = source.upcoming(plan.entries)
    assert source.upcoming(plan.entries) == []
    second = source.open(sender.write(2, plan, weights[1]), 2, plan.entries)
    assert second["w"].data_ptr() == later["w"].data_ptr() and torch.equal(second["w"], weights[1]["w"])
    assert torch.equal(first["w"], weights[0]["w"])
    sender.close()
    source.close()


def test_memory_for_one_buffer_only_is_an_error_that_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def scarce(nbytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
        sizes.append(nbytes)
        return allocate(nbytes if len(sizes) != 2 else 1 << 50, device)

    monkeypatch.setattr(cuda_ipc, "allocate", scarce)
    sender, source = CudaIpcSender(RUN_ID), CudaIpcSource()
    weights = make_weights(SMALL, 1)
    plan = plan_weights(weights, "float32")
    with pytest.raises(DeliveryError, match="out of memory"):
        sender.write(1, plan, weights)
    assert len(leftovers()) == 1
    location = sender.write(1, plan, weights)
    assert torch.equal(source.open(location, 1, plan.entries)["a"], weights["a"])
    assert sizes == [plan.nbytes] * 2, "the buffer that was made serves"
    sender.close()
    source.close()
    assert leftovers() == []


def test_a_receiver_prepares_for_both_buffers_before_it_serves(monkeypatch: pytest.MonkeyPatch):
    live = {name: torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for name, shape in SMALL.items()}
    sender = CudaIpcSender(RUN_ID)
    publisher, receiver = Publisher(sender, "bfloat16", 1e-5, CANARY), Receiver(live, "engine-0")
    made: list[Counter[str]] = []

    def counted(real: Any) -> Any:
        class Counted(real):
            def __init__(self, *arguments: Any) -> None:
                made[-1][real.__name__] += 1
                super().__init__(*arguments)

        return Counted

    for version in (1, 2, 3):
        weights = make_weights(SMALL, version)
        manifest = publish(publisher, version, weights)
        made.append(Counter())
        with monkeypatch.context() as watched:
            watched.setattr(kernels, "DeviceDigest", counted(DeviceDigest))
            watched.setattr(kernels, "DeviceCopy", counted(DeviceCopy))
            staged = receiver.stage(manifest)
            proof = receiver.swap(staged, lambda ids: np.zeros(len(ids) - 1, np.float32))
        assert proof.accepted
        assert all(torch.equal(live[name], tensor) for name, tensor in served(weights).items())
        publisher.acknowledged(version)
    assert made[0] == {"DeviceDigest": 3, "DeviceCopy": 2}, "digests of both buffers and the live weights, two copies"
    assert not made[1] and not made[2]
    receiver.close()
    publisher.close()


def test_a_buffer_serves_all_versions_that_fit_into_it():
    sender, source = CudaIpcSender(RUN_ID), CudaIpcSource()
    locations = []
    for version, rows in enumerate((4096, 8, 2048, 16, 8192, 8), start=1):
        weights = make_weights({"w": (rows, 1024)}, version)
        plan = plan_weights(weights, "float32")
        locations.append(sender.write(version, plan, weights))
        assert torch.equal(source.open(locations[-1], version, plan.entries)["w"], weights["w"])
        source.verify(locations[-1], version)
        sender.release(locations[-1])
    assert len(set(locations[:4])) == 1 and locations[4] == locations[5] != locations[0]
    sender.close()
    source.close()


def timed(publisher: Publisher, engine: Engine, weights: dict[str, torch.Tensor], versions: range) -> list[list[float]]:
    """Milliseconds that the trainer lost, from publish to the manifest, of staging, of the copy; a row per version."""
    rows = []
    for version in versions:
        torch.cuda.synchronize()
        started = time.perf_counter()
        manifest = publish(publisher, version, weights)
        ready = time.perf_counter() - started
        proof, _ = engine.load(manifest)
        assert proof.accepted, proof.reason
        publisher.acknowledged(version)
        seconds = [publisher.last_snapshot_seconds, ready, proof.stage_seconds, proof.swap_seconds]
        rows.append([1000 * value for value in seconds])
    return rows


def report(name: str, rows: list[list[float]]) -> None:
    lost, ready, staged, copied = np.median(np.array(rows[1:]), axis=0)
    print(
        f"\n{name}: trainer lost {lost:.2f} ms, publish to manifest {ready:.2f} ms, staged in {staged:.2f} ms"
        f" (publish to staged {ready + staged:.2f} ms), swap {copied:.2f} ms; first staging {rows[0][2]:.0f} ms"
    )


def test_times_of_a_model_of_the_size_of_qwen3(capsys: pytest.CaptureFixture[str]):
    shapes = qwen3_shapes()
    weights = make_weights(shapes, 1)
    wanted = plain_sum(served(weights))
    engine = Engine(shapes)
    assert engine.read() == "ready"
    version = 0
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "cuda_ipc": ("cuda_ipc", {}),
        "nccl, packed": ("nccl", {}),
        "nccl, per parameter": ("nccl", {"per_parameter": True}),
    }
    for name, (transport, options) in kinds.items():
        publisher = Publisher(make_sender(transport, **options), "bfloat16", 1e-5, CANARY, deadline=30.0)
        rows = timed(publisher, engine, weights, range(version + 1, version + 6))
        version += 5
        with capsys.disabled():
            report(name, rows)
        publisher.close()
    publisher = Publisher(make_sender("cuda_ipc"), "bfloat16", 1e-5, CANARY)
    proof, total = engine.load(publish(publisher, version + 1, weights))
    assert proof.accepted, proof.reason
    assert total == wanted
    publisher.close()
    engine.end()
