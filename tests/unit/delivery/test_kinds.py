"""What is sent: all weights, what changed, or an adapter. Whatever it is, engines end with the same bits."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.delivery.base import Canary, Manifest, Proof, Tolerance, canary_error
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import DeliveryError, WrongBase

KINDS = ["full", "delta", "adapter"]
BASE_DIGEST = 0x1234


def wide(seed: int) -> dict[str, torch.Tensor]:
    """The bigram model's weights, and many that its scores do not depend on."""
    return make_weights(seed) | {"body": torch.randn(64, 65, generator=torch.Generator().manual_seed(seed))}


def step(version: int) -> dict[str, torch.Tensor]:
    """The weights of a version: few of them differ from those of the one before."""
    weights = wide(0)
    for earlier in range(1, version + 1):
        draw = torch.Generator().manual_seed(earlier)
        for tensor in weights.values():
            flat = tensor.view(-1)
            flat[torch.randint(len(flat), (max(1, len(flat) // 50),), generator=draw)] += 1
    return weights


def served(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an engine in float32 holds of weights that travel in bfloat16."""
    return {n: w.to(torch.bfloat16).float() if w.is_floating_point() else w for n, w in weights.items()}


class Pair:
    """A publisher, and engines that hold what it has sent."""

    def __init__(self, transport: str, kind: str, directory: Path, engines: int = 1) -> None:
        self.publisher = Publisher(
            sender(transport, SenderSettings(run_id="kinds-test", directory=directory)),
            "bfloat16",
            1e-5,
            CANARY,
            send=kind,
            base_digest=BASE_DIGEST if kind == "adapter" else 0,
            deadline=5.0,
        )
        self.lives = [wide(99) for _ in range(engines)]
        base = BASE_DIGEST if kind == "adapter" else None
        self.receivers = [Receiver(live, f"engine-{i}", base_digest=base) for i, live in enumerate(self.lives)]

    def publish(self, version: int) -> Manifest:
        weights = step(version)
        serving = served(weights)
        return self.publisher.publish(version, -1, version, weights, lambda ids: score(serving, ids)).result(30)

    def swap(self, manifest: Manifest, engine: int = 0) -> Proof:
        receiver, live = self.receivers[engine], self.lives[engine]
        return receiver.swap(receiver.stage(manifest), lambda ids: score(live, ids))

    def holds(self, version: int, engine: int = 0) -> bool:
        wanted = served(step(version))
        return all(torch.equal(live, wanted[name]) for name, live in self.lives[engine].items())

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.publisher.close()


@pytest.fixture(params=["shm", "file", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, transport: str, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(transport, request.param, tmp_path / "weights", engines=2)
    yield made
    made.close()


@pytest.fixture
def deltas(tmp_path: Path) -> Iterator[Pair]:
    made = Pair("shm", "delta", tmp_path, engines=2)
    yield made
    made.close()


def test_every_kind_on_every_transport_ends_with_the_same_bits(pair: Pair):
    for version in range(1, 6):
        manifest = pair.publish(version)
        for engine in range(2):
            proof = pair.swap(manifest, engine)
            assert proof.accepted and proof.live_digest == manifest.digest
            assert pair.holds(version, engine)
        pair.publisher.acknowledged(version)


def test_a_flipped_bit_is_rejected_whatever_is_sent(pair: Pair, transport: str):
    pair.swap(pair.publish(1))
    pair.publisher.acknowledged(1)
    manifest = pair.publish(2)
    damaged = msgspec.structs.replace(manifest, digest=manifest.digest ^ 1)
    with pytest.raises(DeliveryError, match="arrived wrong"):
        pair.swap(damaged)
    assert pair.holds(1) and pair.receivers[0].version == 1
    assert pair.swap(manifest).accepted and pair.holds(2)


def test_a_delta_is_smaller_and_names_its_base(deltas: Pair):
    whole = deltas.publish(1)
    assert whole.kind == "full" and whole.payload is None
    deltas.publisher.acknowledged(1)
    changed = deltas.publish(2)
    assert (changed.kind, changed.base) == ("delta", 1)
    assert changed.payload is not None
    assert sum(e.nbytes for e in changed.payload) < sum(e.nbytes for e in changed.entries) / 4


def test_an_engine_that_missed_a_version_says_so_and_takes_all_of_it(deltas: Pair):
    first = deltas.publish(1)
    assert deltas.swap(first, 0).accepted and deltas.swap(first, 1).accepted
    deltas.publisher.acknowledged(1)
    assert deltas.swap(deltas.publish(2), 0).accepted
    deltas.publisher.acknowledged(2)
    third = deltas.publish(3)
    assert (third.kind, third.base) == ("delta", 2)
    assert deltas.swap(third, 0).accepted
    with pytest.raises(WrongBase, match="is a change to version 2, but this engine has version 1"):
        deltas.receivers[1].stage(third)
    assert deltas.holds(1, 1)
    again = deltas.publisher.resend(third).result(30)
    assert (again.kind, again.version, again.digest) == ("full", 3, third.digest)
    assert deltas.swap(again, 1).accepted and deltas.holds(3, 1)
    deltas.publisher.acknowledged(3)
    fourth = deltas.publish(4)
    assert fourth.kind == "delta"
    assert all(deltas.swap(fourth, engine).accepted and deltas.holds(4, engine) for engine in range(2))


def test_many_engines_that_missed_a_version_take_all_of_it_from_one_place(deltas: Pair):
    deltas.swap(deltas.publish(1))
    deltas.publisher.acknowledged(1)
    second = deltas.publish(2)
    assert second.kind == "delta" and deltas.swap(second).accepted
    wholes = [deltas.publisher.resend(second).result(30) for _ in range(4)]
    assert {whole.location for whole in wholes} == {wholes[0].location} != {second.location}
    assert deltas.swap(wholes[-1], 1).accepted and deltas.holds(2, 1)
    deltas.publisher.acknowledged(2)
    # Both places are free again.
    third = deltas.publish(3)
    assert third.kind == "delta" and deltas.swap(third).accepted
    assert deltas.publisher.resend(third).result(30).kind == "full"


def test_a_quarantined_engine_takes_no_delta(deltas: Pair):
    deltas.swap(deltas.publish(1))
    deltas.publisher.acknowledged(1)
    second = deltas.publish(2)
    receiver = deltas.receivers[0]
    proof = receiver.swap(receiver.stage(second), lambda ids: np.full(len(ids) - 1, -50.0, np.float32))
    assert proof.quarantined
    deltas.publisher.acknowledged(2)
    third = deltas.publish(3)
    with pytest.raises(WrongBase, match="unproved"):
        receiver.stage(third)
    assert deltas.swap(deltas.publisher.resend(third).result(30)).accepted and deltas.holds(3)


def test_a_delta_waits_until_engines_hold_its_base(deltas: Pair):
    deltas.swap(deltas.publish(1))
    deltas.publisher.acknowledged(1)
    second = deltas.publish(2)
    weights = step(3)
    serving = served(weights)
    third = deltas.publisher.publish(3, 2, 3, weights, lambda ids: score(serving, ids))
    time.sleep(0.1)
    assert not third.done()
    assert deltas.swap(second).accepted
    deltas.publisher.acknowledged(2)
    manifest = third.result(60)
    assert (manifest.kind, manifest.base) == ("delta", 2)
    assert deltas.swap(manifest).accepted and deltas.holds(3)


def test_what_changed_everywhere_is_sent_whole(tmp_path: Path):
    pair = Pair("shm", "delta", tmp_path)
    try:
        pair.swap(pair.publish(1))
        pair.publisher.acknowledged(1)
        # Bits without any order: nothing is smaller than all of them.
        noise = torch.randint(0, 0x7F00, (64, 65), generator=torch.Generator().manual_seed(7)).to(torch.int16)
        weights = served(wide(7)) | {"body": noise.view(torch.bfloat16).float()}
        manifest = pair.publisher.publish(2, 1, 2, weights, lambda ids: score(weights, ids)).result(30)
        assert manifest.kind == "full"
        assert pair.swap(manifest).accepted
        travelling = {n: w.to(torch.bfloat16) if w.is_floating_point() else w for n, w in weights.items()}
        assert digest(travelling.items()) == manifest.digest
    finally:
        pair.close()


def test_an_adapter_to_other_weights_is_rejected(tmp_path: Path):
    pair = Pair("shm", "adapter", tmp_path)
    try:
        manifest = pair.publish(1)
        with pytest.raises(DeliveryError, match="adapter to weights with digest"):
            pair.swap(msgspec.structs.replace(manifest, base_digest=7))
        with pytest.raises(DeliveryError, match="this engine takes an adapter"):
            pair.swap(msgspec.structs.replace(manifest, kind="full"))
        assert pair.swap(manifest).accepted
        whole = Receiver(wide(0), "engine-9")
        with pytest.raises(DeliveryError, match="this engine takes all weights"):
            whole.stage(manifest)
        whole.close()
    finally:
        pair.close()


def test_the_error_of_a_canary_by_hand():
    canary = Canary(token_ids=np.arange(4, dtype=np.int32), logprobs=np.array([-1.0, -2.0, -30.0], np.float32))
    assert canary_error(canary, np.array([-1.0, -2.5, -29.0], np.float32)) == pytest.approx(0.5)
    assert canary_error(canary, np.array([-1.0, -2.0, np.nan], np.float32)) == np.inf
    assert canary_error(canary, np.array([-1.0, -2.0], np.float32)) == np.inf
    alone = Canary(token_ids=np.zeros(1, np.int32), logprobs=np.zeros(0, np.float32))
    assert canary_error(alone, np.zeros(0, np.float32)) == 0


def test_the_first_version_calibrates_the_canary():
    canary = Canary(token_ids=CANARY, logprobs=np.zeros(len(CANARY) - 1, np.float32))
    tolerance = Tolerance()
    assert tolerance.of(canary) == 0.5
    tolerance.proved(canary, 0.02)
    assert tolerance.of(canary) == pytest.approx(0.08)
    tolerance.proved(canary, 0.07)
    assert tolerance.of(canary) == pytest.approx(0.08)
    unlikely, less_likely = (
        msgspec.structs.replace(canary, logprobs=np.full(len(CANARY) - 1, -size, np.float32)) for size in (20, 30)
    )
    sixteen_bits = Tolerance()
    sixteen_bits.proved(unlikely, 0.2)
    assert sixteen_bits.of(unlikely) == pytest.approx(0.8)
    assert sixteen_bits.of(less_likely) == pytest.approx(1.2)
    assert sixteen_bits.of(canary) == pytest.approx(0.04)
    exact = Tolerance()
    exact.proved(canary, 1e-7)
    assert exact.of(canary) == 1e-3
    assert tolerance.of(msgspec.structs.replace(canary, tolerance=0.3)) == 0.3
