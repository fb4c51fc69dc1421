from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Installed, Receiver
from headrace.delivery.transports.shm import ShmSender
from headrace.errors import DeliveryError


class Delivery:
    """A publisher and a receiver in one process; what the receiver's hook saw."""

    def __init__(self) -> None:
        self.publisher = Publisher(ShmSender("install-test"), "float32", 1e-5, CANARY, deadline=60.0)
        self.live = make_weights(0)
        self.hooked: list[int] = []
        self.hook = lambda: self.hooked.append(int(self.live["steps"]))
        self.receiver = Receiver(self.live, "engine-0", installed=lambda: self.hook())

    def publish(self, version: int, *, acknowledge: bool = True) -> Manifest:
        weights = make_weights(version)
        manifest = self.publisher.publish(version, 0, version, weights, lambda ids: score(weights, ids)).result(30)
        if acknowledge:
            self.publisher.acknowledged(version)
        return manifest

    def install(self, version: int) -> Installed:
        return self.receiver.install(self.receiver.stage(self.publish(version)))

    def score(self):
        return score(self.live, CANARY)

    def close(self) -> None:
        self.receiver.close()
        self.publisher.close()


@pytest.fixture
def delivery() -> Iterator[Delivery]:
    made = Delivery()
    yield made
    made.close()


def holds(delivery: Delivery, version: int) -> bool:
    return all(torch.equal(tensor, make_weights(version)[name]) for name, tensor in delivery.live.items())


def test_installed_weights_are_live_and_no_version_until_they_are_proved(delivery: Delivery):
    for version in (1, 2):
        installed = delivery.install(version)
        assert installed.ready()
        assert holds(delivery, version)
        assert delivery.receiver.quarantined
        assert delivery.receiver.version == -1
        proof = delivery.receiver.prove(installed, delivery.score())
        assert proof.accepted
        assert not proof.quarantined
        assert proof.live_digest == proof.staged_digest == digest(make_weights(version).items())
        assert 0 < proof.swap_seconds < 30
        assert delivery.receiver.version == version
        assert not delivery.receiver.quarantined


def test_a_proof_that_fails_quarantines(delivery: Delivery):
    delivery.receiver.prove(delivery.install(1), delivery.score())
    proof = delivery.receiver.prove(delivery.install(2), delivery.score() + np.float32(0.5))
    assert proof.quarantined
    assert not proof.accepted
    assert proof.reason == "the canary is off by 0.5 (tolerance 1e-05)"
    assert delivery.receiver.quarantined
    assert delivery.receiver.version == -1
    assert delivery.receiver.prove(delivery.install(3), delivery.score()).accepted


def test_a_proof_that_raises_quarantines(delivery: Delivery):
    installed = delivery.install(1)
    with pytest.raises(ValueError, match="could not convert"):
        delivery.receiver.prove(installed, np.array(["nonsense"]))  # type: ignore[arg-type]
    assert delivery.receiver.quarantined
    with pytest.raises(DeliveryError, match="version 1 is no longer installed"):
        delivery.receiver.prove(installed, delivery.score())
    assert delivery.receiver.quarantined


def test_only_what_was_installed_last_can_be_proved(delivery: Delivery):
    first, second = delivery.install(1), delivery.install(2)
    with pytest.raises(DeliveryError, match="version 1 is no longer installed"):
        delivery.receiver.prove(first, score(make_weights(1), CANARY))
    assert delivery.receiver.prove(second, delivery.score()).accepted
    with pytest.raises(DeliveryError, match="version 2 is no longer installed"):
        delivery.receiver.prove(second, delivery.score())
    assert delivery.receiver.version == 2


def test_the_next_version_is_staged_before_the_last_is_proved(delivery: Delivery):
    installed = delivery.install(1)
    staged = delivery.receiver.stage(delivery.publish(2))
    assert holds(delivery, 1)
    assert delivery.receiver.prove(installed, delivery.score()).accepted
    assert delivery.receiver.prove(delivery.receiver.install(staged), delivery.score()).accepted
    assert holds(delivery, 2)


def test_versions_never_go_back(delivery: Delivery):
    older = delivery.publish(1, acknowledge=False)
    installed = delivery.install(2)
    staged = delivery.receiver.stage(older)
    assert delivery.receiver.prove(installed, delivery.score()).accepted
    with pytest.raises(DeliveryError, match="version 1 is out of order: version 2 is live"):
        delivery.receiver.install(staged)
    assert delivery.receiver.version == 2
    assert holds(delivery, 2)


def test_the_hook_sees_the_new_weights_before_they_are_scored(delivery: Delivery):
    installed = delivery.install(1)
    assert delivery.hooked == [1]
    delivery.receiver.prove(installed, delivery.score())

    def scored(ids):
        assert delivery.hooked == [1, 2]
        return score(delivery.live, ids)

    assert delivery.receiver.swap(delivery.receiver.stage(delivery.publish(2)), scored).accepted


def test_a_hook_that_breaks_the_weights_is_found_out(delivery: Delivery):
    delivery.hook = lambda: delivery.live["bias"].add_(1)
    # Equal shifts of all logits: the canary cannot see them.
    proof = delivery.receiver.prove(delivery.install(1), delivery.score())
    assert proof.quarantined
    assert proof.canary_error < 1e-5
    assert proof.reason == f"the live weights have digest {proof.live_digest:016x}, not {proof.staged_digest:016x}"


def test_a_hook_that_raises_quarantines(delivery: Delivery):
    staged = delivery.receiver.stage(delivery.publish(1))
    delivery.hook = lambda: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        delivery.receiver.install(staged)
    assert delivery.receiver.quarantined
    delivery.hook = lambda: None
    assert delivery.receiver.prove(delivery.install(2), delivery.score()).accepted


def test_signs_of_zero_and_infinities_survive_a_wider_live_dtype():
    assert installed_in_float32(torch.tensor([0.0, -0.0, float("inf"), float("-inf")], dtype=torch.bfloat16))


def test_nans_survive_a_wider_live_dtype_or_are_refused():
    """Some processors change the bits of a NaN when they cast it: that is a loss like any other."""
    nan = torch.tensor([1.0, float("nan")], dtype=torch.bfloat16)
    if torch.equal(nan.float().bfloat16().view(torch.int16), nan.view(torch.int16)):
        assert installed_in_float32(nan)
    else:
        with pytest.raises(
            DeliveryError, match="w is published as bfloat16 and loses precision as the engine's float32"
        ):
            installed_in_float32(nan)


def installed_in_float32(weights: torch.Tensor) -> bool:
    """Publish in bfloat16 and install in float32; whether it was proved and every bit is there."""
    publisher = Publisher(ShmSender("install-test"), "bfloat16", 1.0, CANARY, deadline=60.0)
    live = {"w": torch.zeros(len(weights))}
    receiver = Receiver(live, "engine-0")
    try:
        manifest = publisher.publish(1, 0, 1, {"w": weights}, lambda ids: np.zeros(7, np.float32)).result(30)
        installed = receiver.install(receiver.stage(manifest))
        proved = receiver.prove(installed, np.zeros(7, np.float32)).accepted
        return proved and torch.equal(live["w"].bfloat16().view(torch.int16), weights.view(torch.int16))
    finally:
        receiver.close()
        publisher.close()
