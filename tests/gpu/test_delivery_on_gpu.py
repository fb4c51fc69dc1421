import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from headrace.delivery import kernels
from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest
from headrace.delivery.digest_sums import BLOCK
from headrace.delivery.kernels import DeviceCopy, DeviceDigest
from headrace.delivery.live import DeviceCopies
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports.shm import ShmSender
from headrace.errors import DeliveryError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CANARY = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
SLEEP_CYCLES = 400_000_000
"""About a quarter of a second on the engine's stream."""


def make_weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"logits": (16, 16), "layer.0": (1000, 333), "layer.1": (512, 4096), "norm": (77,), "empty": (0,)}
    weights = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return weights | {"steps": torch.tensor(seed)}


def score(weights: dict[str, torch.Tensor], token_ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(token_ids).long()
    logprobs = weights["logits"].detach().cpu().float().log_softmax(-1)
    return logprobs[tokens[:-1], tokens[1:]].numpy()


class Delivery:
    """A publisher on the host and a receiver whose live weights are on the GPU."""

    def __init__(self, live: torch.dtype = torch.bfloat16) -> None:
        self.publisher = Publisher(ShmSender("gpu-test"), "bfloat16", 1e-5, CANARY, deadline=5.0)
        self.live = {name: tensor.cuda() for name, tensor in make_weights(0, live).items()}
        self.receiver = Receiver(self.live, "engine-0")

    def publish(self, version: int) -> Manifest:
        weights = make_weights(version)
        manifest = self.publisher.publish(version, 0, version, weights, lambda ids: score(weights, ids)).result(60)
        self.publisher.acknowledged(version)
        return manifest

    def holds(self, version: int) -> bool:
        wanted = make_weights(version)
        return all(torch.equal(tensor.cpu(), wanted[name].to(tensor.dtype)) for name, tensor in self.live.items())

    def score(self, ids: np.ndarray = CANARY) -> np.ndarray:
        return score(self.live, ids)

    def close(self) -> None:
        self.receiver.close()
        self.publisher.close()


@pytest.fixture
def delivery() -> Iterator[Delivery]:
    made = Delivery()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8], ids=str)
def test_the_digest_on_the_gpu_is_that_on_the_host(dtype: torch.dtype):
    sizes = [0, 1, 7, 511, 513, BLOCK - 1, BLOCK, BLOCK + 1, 32 * BLOCK, 32 * BLOCK + 1, 150 * BLOCK + 4321]
    host = {}
    for n in sizes:
        raw = torch.randint(
            0, 256, (n * dtype.itemsize,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n)
        )
        host[f"w{n}"] = raw.view(dtype)
    device = {name: tensor.cuda() for name, tensor in host.items()}
    wanted = digest(host.items())
    made = DeviceDigest(device)
    assert made.value(made.launch()) == wanted
    assert digest(device.items()) == wanted
    device["w7"].view(torch.uint8)[3] ^= 16
    assert made.value(made.launch()) != wanted


def test_strided_unaligned_and_cast_tensors_are_digested_as_they_are():
    flat = torch.randn(6001, device="cuda")
    weights = {"strided": flat[:6000].view(60, 100).t(), "unaligned": flat[1:], "cast": flat}
    made = DeviceDigest(weights, {"cast": torch.bfloat16})
    for _ in range(2):
        host = {name: tensor.cpu() for name, tensor in weights.items()}
        assert made.value(made.launch()) == digest((host | {"cast": host["cast"].bfloat16()}).items())
        flat.add_(1)


@pytest.mark.parametrize("live", [torch.bfloat16, torch.float32], ids=str)
def test_versions_are_staged_installed_and_proved(live: torch.dtype):
    delivery = Delivery(live)
    addresses = {name: tensor.data_ptr() for name, tensor in delivery.live.items()}
    for version in range(1, 4):
        manifest = delivery.publish(version)
        installed = delivery.receiver.install(delivery.receiver.stage(manifest))
        assert delivery.receiver.quarantined
        assert delivery.holds(version)
        proof = delivery.receiver.prove(installed, delivery.score())
        assert proof.accepted, proof.reason
        assert installed.ready()
        assert proof.live_digest == proof.staged_digest == manifest.digest == digest(make_weights(version).items())
        assert 0 < proof.swap_seconds < 1
        assert delivery.receiver.version == version
    assert delivery.receiver.swap(delivery.receiver.stage(delivery.publish(9)), delivery.score).accepted
    assert addresses == {name: tensor.data_ptr() for name, tensor in delivery.live.items()}
    delivery.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for every copy that is recorded; what is recorded is not kept."""
    made: list[None] = []

    def record(*tensors: Any) -> DeviceCopy:
        made.append(None)
        return DeviceCopy(*tensors)

    monkeypatch.setattr(kernels, "DeviceCopy", record)
    return made


def test_a_recorded_copy_is_made_again_and_keeps_no_weights_alive(recorded: list[None]):
    copies = DeviceCopies(torch.device("cuda", 0))
    targets = {name: torch.zeros_like(tensor).cuda() for name, tensor in make_weights(0).items()}
    sources = {name: tensor.cuda() for name, tensor in make_weights(1).items()}
    for _ in range(3):
        copies.copy(7, targets, sources)
        assert all(torch.equal(target, sources[name]) for name, target in targets.items())
        for source in sources.values():
            source.add_(1)
    assert len(recorded) == 1
    held = [weakref.ref(source) for source in sources.values()]
    del sources, source
    assert not any(ref() is not None for ref in held)
    copies.close()


def test_decoding_does_not_wait_until_the_copy_is_recorded(delivery: Delivery, recorded: list[None]):
    for version in range(1, 4):
        staged = delivery.receiver.stage(delivery.publish(version))
        assert len(recorded) == 1
        assert delivery.receiver.swap(staged, delivery.score).accepted
        assert len(recorded) == 1
        assert delivery.holds(version)


def test_live_weights_that_change_after_the_copy_quarantine(delivery: Delivery):
    staged = delivery.receiver.stage(delivery.publish(1))
    broken = Receiver(delivery.live, "engine-0", installed=lambda: delivery.live["layer.1"][3, 5].add_(1))
    proof = broken.prove(broken.install(broken.stage(staged.manifest)), delivery.score())
    assert proof.quarantined
    assert proof.canary_error < 1e-5
    assert proof.live_digest != proof.staged_digest
    broken.close()


def test_staging_does_not_wait_for_a_busy_engine(delivery: Delivery):
    delivery.receiver.swap(delivery.receiver.stage(delivery.publish(1)), delivery.score)
    manifest = delivery.publish(2)
    engine = torch.cuda.Stream()
    staged = []
    with torch.cuda.stream(engine):
        torch.cuda._sleep(SLEEP_CYCLES * 8)
        busy = engine.record_event()
        thread = threading.Thread(target=lambda: staged.append(delivery.receiver.stage(manifest)))
        thread.start()
        thread.join(60)
        assert staged
        assert not busy.query()
        installed = delivery.receiver.install(staged[0])
        # The copy is behind the engine's work, and the host is not.
        assert not busy.query()
        assert not installed.ready()
        proof = delivery.receiver.prove(installed, delivery.score())
    assert proof.accepted, proof.reason
    assert proof.swap_seconds < 0.5
    assert delivery.holds(2)


def test_the_next_staging_leaves_the_buffer_to_the_copy_that_reads_it(delivery: Delivery):
    engine = torch.cuda.Stream()
    with torch.cuda.stream(engine):
        for version in range(1, 9, 2):
            staged = delivery.receiver.stage(delivery.publish(version))
            following = delivery.publish(version + 1)
            torch.cuda._sleep(SLEEP_CYCLES)
            installed = delivery.receiver.install(staged)
            seen = {name: tensor.clone() for name, tensor in delivery.live.items()}
            staged = delivery.receiver.stage(following)
            wanted = make_weights(version)
            assert all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in seen.items())
            assert delivery.receiver.prove(installed, delivery.score()).accepted
            assert delivery.receiver.swap(staged, delivery.score).accepted
            assert delivery.holds(version + 1)


def test_a_wrong_digest_is_rejected_while_staged(delivery: Delivery):
    manifest = delivery.publish(1)
    manifest.digest ^= 1
    with pytest.raises(DeliveryError, match="version 1 arrived wrong"):
        delivery.receiver.stage(manifest)
    assert delivery.holds(0)
    assert not delivery.receiver.quarantined
