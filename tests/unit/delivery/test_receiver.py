import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.delivery.base import Manifest, Proof
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver, Staged
from headrace.delivery.transports.segments import HEADER_BYTES
from headrace.delivery.transports.shm import ShmSender, ShmSource
from headrace.errors import DeliveryError


class Delivery:
    """A publisher and a receiver in one process, with the receiver's live weights."""

    def __init__(self, published: str = "float32", live: torch.dtype = torch.float32) -> None:
        self.published = getattr(torch, published)
        self.publisher = Publisher(ShmSender("receiver-test"), published, 1e-5, CANARY, deadline=60.0)
        self.live = make_weights(0, live)
        self.receiver = Receiver(self.live, "engine-0")

    def publish(self, version: int, **changed: torch.Tensor) -> Manifest:
        weights = make_weights(version) | changed
        serving = {name: w.to(self.published) for name, w in weights.items()}
        return self.publisher.publish(version, 0, version, weights, lambda ids: score(serving, ids)).result(30)

    def swap(self, manifest: Manifest) -> Proof:
        return self.receiver.swap(self.receiver.stage(manifest), self.score)

    def swap_staged(self, staged: Staged) -> Proof:
        return self.receiver.swap(staged, self.score)

    def score(self, ids):
        return score(self.live, ids)

    def close(self) -> None:
        self.receiver.close()
        self.receiver.close()
        self.publisher.close()


@pytest.fixture
def delivery() -> Iterator[Delivery]:
    made = Delivery()
    yield made
    made.close()


def assert_untouched(delivery: Delivery, version: int = 0) -> None:
    assert all(torch.equal(tensor, make_weights(version)[name]) for name, tensor in delivery.live.items())


def test_a_version_is_staged_swapped_and_proved(delivery: Delivery):
    addresses = {name: tensor.data_ptr() for name, tensor in delivery.live.items()}
    for version in range(1, 5):
        manifest = delivery.publish(version)
        staged = delivery.receiver.stage(manifest)
        assert_untouched(delivery, version - 1)
        assert delivery.receiver.version == (version - 1 or -1)
        proof = delivery.receiver.swap(staged, delivery.score)
        assert proof.accepted
        assert not proof.quarantined
        assert proof.reason == ""
        assert proof.engine == "engine-0"
        assert proof.version == delivery.receiver.version == version
        assert proof.staged_digest == proof.live_digest == manifest.digest == digest(make_weights(version).items())
        assert proof.canary_error < 1e-6
        assert 0 < proof.stage_seconds < 30
        assert 0 < proof.swap_seconds < 30
        assert_untouched(delivery, version)
        delivery.publisher.acknowledged(version)
    assert addresses == {name: tensor.data_ptr() for name, tensor in delivery.live.items()}


@pytest.mark.parametrize("bit", [0, 7])
def test_a_bit_that_flips_after_the_digest_is_rejected_while_staged(delivery: Delivery, bit: int):
    delivery.swap(delivery.publish(1))
    manifest = delivery.publish(2)
    with Path(manifest.location).open("r+b") as segment:
        segment.seek(HEADER_BYTES + manifest.entries[1].offset + 5)
        byte = segment.read(1)[0]
        segment.seek(-1, os.SEEK_CUR)
        segment.write(bytes([byte ^ 1 << bit]))
    with pytest.raises(DeliveryError, match=f"version 2 arrived wrong: its digest is .*, not {manifest.digest:016x}"):
        delivery.receiver.stage(manifest)
    assert_untouched(delivery, 1)
    assert delivery.receiver.version == 1
    delivery.publisher.acknowledged(1)
    assert delivery.swap(delivery.publish(3)).accepted


def test_a_segment_used_again_is_rejected(delivery: Delivery):
    first = delivery.publish(1)
    delivery.publish(2)
    delivery.publisher.acknowledged(1)
    third = delivery.publish(3)
    assert third.location == first.location
    with pytest.raises(DeliveryError, match="holds version 3, not 1"):
        delivery.receiver.stage(first)
    assert_untouched(delivery)


def test_a_segment_used_again_during_the_copy_is_rejected(delivery: Delivery, monkeypatch: pytest.MonkeyPatch):
    manifest = delivery.publish(1)
    delivery.publisher.acknowledged(1)
    real_open = ShmSource.open

    def open_then_overwrite(self, *args):
        views = real_open(self, *args)
        delivery.publish(2)
        delivery.publish(3)
        return views

    monkeypatch.setattr(ShmSource, "open", open_then_overwrite)
    with pytest.raises(DeliveryError, match="holds version 3, not 1"):
        delivery.receiver.stage(manifest)
    assert_untouched(delivery)


def test_a_segment_used_again_before_the_swap_is_rejected(delivery: Delivery):
    staged = delivery.receiver.stage(delivery.publish(1))
    delivery.publisher.acknowledged(1)
    delivery.publish(2)
    delivery.publish(3)
    with pytest.raises(DeliveryError, match="holds version 3, not 1"):
        delivery.swap_staged(staged)
    assert_untouched(delivery)
    assert not delivery.receiver.quarantined


def test_the_newest_version_stays_for_an_engine_that_comes_late(delivery: Delivery):
    manifest = delivery.publish(1)
    delivery.publisher.acknowledged(1)
    assert delivery.swap(manifest).accepted


def test_missing_and_truncated_segments_are_rejected(delivery: Delivery):
    manifest = delivery.publish(1)
    os.truncate(manifest.location, 200)
    with pytest.raises(DeliveryError, match="truncated"):
        delivery.receiver.stage(manifest)
    Path(manifest.location).unlink()
    with pytest.raises(DeliveryError, match="cannot be opened: No such file"):
        delivery.receiver.stage(manifest)
    assert_untouched(delivery)


def test_old_versions_are_rejected(delivery: Delivery):
    manifest = delivery.publish(3)
    assert delivery.swap(manifest).accepted
    with pytest.raises(DeliveryError, match="version 3 is out of order: version 3 is live"):
        delivery.receiver.stage(manifest)
    with pytest.raises(DeliveryError, match="version 2 is out of order"):
        delivery.receiver.stage(msgspec.structs.replace(manifest, version=2))


def test_a_plan_that_differs_says_where(delivery: Delivery):
    with pytest.raises(DeliveryError, match="version 1 has extra, which this engine does not know"):
        delivery.receiver.stage(delivery.publish(1, extra=torch.zeros(1)))
    delivery.publisher.acknowledged(1)
    with pytest.raises(DeliveryError, match=r"steps is published with shape \(2,\), but lives with \(\)"):
        delivery.receiver.stage(delivery.publish(2, steps=torch.zeros(2, dtype=torch.int64)))
    delivery.publisher.acknowledged(2)
    with pytest.raises(DeliveryError, match="steps is published as float32, but lives as int64"):
        delivery.receiver.stage(delivery.publish(3, steps=torch.zeros(())))
    delivery.publisher.acknowledged(3)
    manifest = delivery.publish(4)
    with pytest.raises(DeliveryError, match="version 4 lacks bias and 1 more"):
        delivery.receiver.stage(msgspec.structs.replace(manifest, entries=manifest.entries[1:2]))
    moved = [msgspec.structs.replace(manifest.entries[0], offset=64), *manifest.entries[1:]]
    with pytest.raises(DeliveryError, match="packed by another plan"):
        delivery.receiver.stage(msgspec.structs.replace(manifest, entries=moved))
    with pytest.raises(DeliveryError, match="packed by another plan"):
        delivery.receiver.stage(msgspec.structs.replace(manifest, plan_digest=manifest.plan_digest ^ 1))
    assert_untouched(delivery)


def test_a_canary_that_is_off_quarantines_until_a_version_is_proved(delivery: Delivery):
    delivery.swap(delivery.publish(1))
    manifest = delivery.publish(2)
    proof = delivery.receiver.swap(
        delivery.receiver.stage(manifest), lambda ids: delivery.score(ids) + np.float32(0.25)
    )
    assert not proof.accepted
    assert proof.quarantined
    assert proof.reason == "the canary is off by 0.25 (tolerance 1e-05)"
    assert proof.canary_error == pytest.approx(0.25, abs=1e-5)
    assert delivery.receiver.quarantined
    assert delivery.receiver.version == -1
    assert delivery.swap(manifest).accepted
    assert not delivery.receiver.quarantined
    assert delivery.receiver.version == 2


@pytest.mark.parametrize("logprobs", [np.full(7, np.nan, np.float32), np.zeros(6, np.float32)])
def test_a_canary_that_cannot_be_compared_quarantines(delivery: Delivery, logprobs):
    proof = delivery.receiver.swap(delivery.receiver.stage(delivery.publish(1)), lambda ids: logprobs)
    assert proof.quarantined
    assert proof.canary_error == float("inf")


def test_live_weights_that_do_not_hold_what_was_copied_quarantine(delivery: Delivery):
    # An engine that ties two tensors which the trainer has untied.
    delivery.live["bias"] = delivery.live["logits"][0]
    proof = delivery.swap(delivery.publish(1))
    assert proof.quarantined
    assert not proof.accepted
    assert proof.live_digest != proof.staged_digest
    assert proof.reason == f"the live weights have digest {proof.live_digest:016x}, not {proof.staged_digest:016x}"


def test_a_scorer_that_raises_leaves_a_quarantine(delivery: Delivery):
    staged = delivery.receiver.stage(delivery.publish(1))
    with pytest.raises(ZeroDivisionError):
        delivery.receiver.swap(staged, lambda ids: 1 / 0)  # type: ignore[arg-type, return-value]
    assert delivery.receiver.quarantined
    assert delivery.receiver.version == -1
    with pytest.raises(DeliveryError, match="version 1 is no longer staged"):
        delivery.receiver.swap(staged, delivery.score)
    assert delivery.swap(delivery.publish(2)).accepted


def test_only_the_last_staged_version_can_be_swapped(delivery: Delivery):
    first = delivery.receiver.stage(delivery.publish(1))
    second = delivery.receiver.stage(delivery.publish(2))
    with pytest.raises(DeliveryError, match="version 1 is no longer staged"):
        delivery.receiver.swap(first, delivery.score)
    assert_untouched(delivery)
    assert delivery.receiver.swap(second, delivery.score).accepted


def test_deliveries_do_not_overlap(delivery: Delivery):
    staged = delivery.receiver.stage(delivery.publish(1))
    manifest = delivery.publish(2)

    def stage_meanwhile(ids):
        with pytest.raises(DeliveryError, match="cannot stage version 2: another delivery is under way"):
            delivery.receiver.stage(manifest)
        return delivery.score(ids)

    assert delivery.receiver.swap(staged, stage_meanwhile).accepted


def test_weights_in_shared_memory_are_staged_where_they_are(delivery: Delivery):
    addresses = set()
    for version in range(1, 5):
        staged = delivery.receiver.stage(delivery.publish(version))
        addresses.add(staged.weights["logits"].data_ptr())
        delivery.publisher.acknowledged(version)
    assert len(addresses) == 2


def test_a_wider_live_dtype_is_exact():
    delivery = Delivery(published="bfloat16", live=torch.float32)
    proof = delivery.swap(delivery.publish(1))
    assert proof.accepted, proof.reason
    assert torch.equal(delivery.live["logits"], make_weights(1)["logits"].to(torch.bfloat16).float())
    delivery.close()


def test_a_narrower_live_dtype_is_rejected_unless_nothing_is_lost():
    delivery = Delivery(published="float32", live=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in delivery.live.items()}
    with pytest.raises(
        DeliveryError, match="bias is published as float32 and loses precision as the engine's bfloat16"
    ):
        delivery.receiver.stage(delivery.publish(1))
    assert all(torch.equal(before[name], delivery.live[name]) for name in before)
    exact = make_weights(2, torch.bfloat16)
    rounded = {name: exact[name].float() for name in ("logits", "bias")}
    proof = delivery.swap(delivery.publish(2, **rounded))
    assert proof.accepted, proof.reason
    assert torch.equal(delivery.live["logits"], exact["logits"])
    delivery.close()


def test_parameters_that_need_gradients_are_swapped_in_place(delivery: Delivery):
    for name in ("logits", "bias"):
        delivery.live[name] = torch.nn.Parameter(delivery.live[name])
    manifest = delivery.publish(1)
    staged = delivery.receiver.stage(manifest)
    assert delivery.receiver.swap(staged, lambda ids: score(delivery.live, ids)).accepted
    assert torch.equal(delivery.live["logits"].detach(), make_weights(1)["logits"])
