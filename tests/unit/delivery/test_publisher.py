import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from bigram import CANARY, make_weights, score

from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest
from headrace.delivery.plan import plan_digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.shm import ShmSender, ShmSource
from headrace.errors import DeliveryError


@pytest.fixture
def publisher(request: pytest.FixtureRequest) -> Iterator[Publisher]:
    deadline = getattr(request, "param", 60.0)
    made = Publisher(ShmSender("publisher-test"), "bfloat16", 1e-3, CANARY, deadline=deadline)
    yield made
    made.close()
    made.close()


def publish(publisher: Publisher, version: int) -> Manifest:
    weights = make_weights(version)
    future = publisher.publish(version, version - 1, 10 * version, weights, lambda ids: score(weights, ids))
    return future.result(30)


def test_the_manifest_says_what_was_published(publisher: Publisher):
    weights = make_weights(7)
    future = publisher.publish(7, 5, 70, weights, lambda ids: score(weights, ids))
    serving = {name: w.to(torch.bfloat16) if w.is_floating_point() else w.clone() for name, w in weights.items()}
    logprobs = score(weights, CANARY)
    for tensor in weights.values():
        tensor.zero_()
    manifest = future.result(30)
    assert (manifest.version, manifest.parent, manifest.step, manifest.transport) == (7, 5, 70, "shm")
    assert manifest.digest == digest(serving.items())
    assert manifest.plan_digest == plan_digest(manifest.entries)
    assert np.array_equal(manifest.canary.token_ids, CANARY)
    assert np.array_equal(manifest.canary.logprobs, logprobs)
    assert manifest.canary.tolerance == 1e-3
    found = ShmSource().open(manifest.location, 7, manifest.entries)
    assert all(torch.equal(found[name], serving[name]) for name in serving)
    assert 0 < publisher.last_snapshot_seconds < 30


@pytest.mark.parametrize("publisher", [0.3], indirect=True)
def test_the_third_publish_is_given_up_after_the_deadline(publisher: Publisher):
    publish(publisher, 1)
    publish(publisher, 2)
    started = time.monotonic()
    with pytest.raises(DeliveryError, match=r"no segment for version 3: not acknowledged.*version 1 .*version 2 "):
        publish(publisher, 3)
    assert time.monotonic() - started >= 0.3
    publisher.acknowledged(1)
    assert publish(publisher, 3).version == 3
    with pytest.raises(DeliveryError, match=r"version 2 .*version 3 "):
        publish(publisher, 4)
    publisher.acknowledged(2)
    assert publish(publisher, 4).version == 4


def test_the_third_publish_waits_until_one_is_acknowledged(publisher: Publisher):
    publish(publisher, 1)
    publish(publisher, 2)
    threading.Timer(0.1, publisher.acknowledged, [1]).start()
    assert publish(publisher, 3).version == 3


def test_the_newest_version_stays_until_there_is_a_newer_one(publisher: Publisher):
    first = publish(publisher, 1)
    publisher.acknowledged(1)
    ShmSource().open(first.location, 1, first.entries)
    publish(publisher, 2)
    third = publish(publisher, 3)
    assert third.location == first.location


def test_versions_never_go_back(publisher: Publisher):
    publish(publisher, 4)
    for version in (4, 3):
        with pytest.raises(DeliveryError, match=f"version {version} cannot follow version 4"):
            publish(publisher, version)
    assert publish(publisher, 9).parent == 8


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [(np.zeros(8, np.float32), "shape"), (np.full(7, np.nan, np.float32), "not finite")],
)
def test_a_canary_that_proves_nothing_publishes_nothing(publisher: Publisher, logprobs, message: str):
    for version in range(3):
        with pytest.raises(DeliveryError, match=message):
            publisher.publish(version, -1, 0, make_weights(0), lambda ids: logprobs)
    assert publish(publisher, 0).version == 0


def test_publish_after_close_is_an_error(publisher: Publisher):
    publisher.close()
    with pytest.raises(DeliveryError, match="closed"):
        publish(publisher, 1)
