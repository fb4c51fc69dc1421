"""Deliveries by `tcp` from one host to two others, whole and as deltas: a late joiner, a link that is cut."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from delivery_ends import SECONDS, Deliveries, Engine, Way, give_keys
from hosts import Host, Hosts
from transformers import LlamaConfig

from headrace.bench.delivery_sides import Ready
from headrace.bench.options import DeliveryBench

pytestmark = pytest.mark.cluster

WHOLE, DELTA = Way("tcp", "full"), Way("tcp", "delta")
SMALL = LlamaConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
"""72 MB in float32: fetching takes so long that the link can be cut meanwhile."""
OPTIONS = DeliveryBench(model="/tmp/model", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        give_keys(made)
        for host in made:
            SMALL.save_pretrained(host.path(OPTIONS.model))
        yield made


@pytest.fixture(scope="module")
def engines(hosts: list[Host]) -> Iterator[list[Engine]]:
    """Three engines on one host and two on the other. They take longer to start than all deliveries together."""
    with contextlib.ExitStack() as ends:
        made = [Engine(hosts[1 + number % 2], f"engine-{number}", OPTIONS, random_weights=True) for number in range(5)]
        for engine in made:
            ends.callback(engine.close)
        for engine in made:
            engine.answer(Ready)
        yield made


def copies_that_left(between: Deliveries, versions: int) -> list[float]:
    """Deliver versions, and return how many copies of the weights left the trainer's host for each."""
    copies = []
    for _ in range(versions):
        delivered = between.deliver()
        assert delivered.proved
        copies.append(delivered.left_bytes / between.weights_bytes)
        kind, seconds = delivered.published.manifest.kind, delivered.seconds
        print(f"\n{kind}, to {len(between.engines)} engines: {copies[-1]:.4f} copies left in {seconds:.2f} s")
    return copies


@pytest.mark.parametrize("way", [WHOLE, DELTA], ids=str)
def test_two_hosts_a_late_joiner_and_a_link_that_is_cut(hosts: list[Host], engines: list[Engine], way: Way) -> None:
    newcomer = engines[2] if way == WHOLE else engines[4]
    with Deliveries(hosts, way, OPTIONS, engines[:2], random_weights=True) as between:
        copies = copies_that_left(between, 3)
        # So few engines do not relay: each fetches from the trainer. The first version has no base for a delta.
        assert copies[0] >= 2.0 and min(copies) > 0
        assert min(copies) < (2.2 if way == WHOLE else 0.1)

        late = between.join_late(newcomer)
        print(f"a late joiner: {late.left_bytes / between.weights_bytes:.2f} copies in {late.seconds:.2f} s")
        assert late.proved and late.left_bytes >= between.weights_bytes
        if way == DELTA:
            assert "but this engine has version -1" in late.offers[0][0].refused

        cut = between.cut_in_the_middle(hosts[2])
        print(f"cut off, it gave up after {cut.gave_up_seconds:.1f} s: {cut.gave_up.refused}")
        assert cut.gave_up_seconds < SECONDS and cut.gave_up.live_digest == cut.before
        assert cut.others.proved and cut.others.seconds < SECONDS
        print(f"healed, all have proved the next version {cut.after.seconds:.2f} s after its publish")
        assert cut.after.proved
        if way == DELTA:
            assert "is a change to version" in cut.after.offers[1][0].refused

        # Now everybody has the same version again.
        assert min(copies_that_left(between, 2)) < (3.2 if way == WHOLE else 0.1)


def test_five_engines_relay_to_each_other(hosts: list[Host], engines: list[Engine]) -> None:
    with Deliveries(hosts, WHOLE, OPTIONS, engines, random_weights=True) as between:
        assert 2.0 <= min(copies_that_left(between, 3)) < 2.2
