"""Log-probabilities among kept tokens, and entropies, against naive loops over plain models; what memory they hold."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import VOCABULARY, AllDouble, random_batch, twins
from test_packed_gradients import gradients_of, perturbed, reference_gradients, relative_error

from headrace.config.schema import AlgorithmConfig
from headrace.training import logprobs
from headrace.training.logprobs import Wanted, read
from headrace.training.rows import plan
from headrace.types import Kept


@pytest.fixture
def all_double():
    with AllDouble():
        yield


def with_kept(batch, seed=0, share=0.7):
    """Kept sets of all sizes for a share of the trained tokens; each holds its token."""
    rng = np.random.default_rng(seed)
    counts, ids = [], []
    for token, trained in zip(batch.token_ids.tolist(), batch.trained.tolist(), strict=True):
        if not trained or rng.random() > share:
            counts.append(0)
            continue
        size = int(rng.choice([1, 2, 7, VOCABULARY]))
        others = rng.permutation(np.setdiff1d(np.arange(VOCABULARY), [token]))[: size - 1]
        ids.append(np.sort(np.append(others, token)))
        counts.append(size)
    kept = Kept(counts=np.array(counts, np.int32), token_ids=np.concatenate(ids).astype(np.int32))
    return msgspec.structs.replace(batch, kept=kept)


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("elements", [1 << 26, VOCABULARY * 5])
def test_kept_sets_and_entropy_equal_a_naive_loop(family, elements, share, monkeypatch, all_double):
    """Tied, untied and capped heads, in one piece and in chunks; with every addition to the loss that looks at them."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    packed, plain = twins(family, torch.float64)
    batch = with_kept(random_batch(11, temperature=0.7), share=share)
    algorithm = AlgorithmConfig(loss="grpo", entropy_weight=0.3, kl="k2", kl_weight=0.2)
    ours, theirs = perturbed(5, family)
    loss, expected = reference_gradients(plain, batch, algorithm, {"reference": theirs})
    for budget in (10_000, 30):
        result, found = gradients_of(
            packed, batch, algorithm=algorithm, micro_batch_tokens=budget, others={"reference": ours}
        )
        assert abs(result.loss - loss) < 1e-9
        assert relative_error(found, expected) < 1e-9


@pytest.mark.parametrize("elements", [1 << 26, VOCABULARY * 5])
def test_float32_is_within_a_hundred_thousandth(elements, monkeypatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    packed, plain = twins("gemma2")
    batch = with_kept(random_batch(12))
    algorithm = AlgorithmConfig(entropy_weight=0.1)
    result, found = gradients_of(packed, batch, algorithm=algorithm)
    loss, expected = reference_gradients(plain, batch, algorithm)
    assert abs(result.loss - loss) < 1e-5
    assert relative_error(found, expected) < 1e-5


def test_measuring_the_entropy_does_not_change_the_gradient(all_double):
    packed, plain = twins("llama", torch.float64)
    batch = with_kept(random_batch(13))
    _, expected = gradients_of(packed, batch)
    measured, found = gradients_of(packed, batch, algorithm=AlgorithmConfig(entropy_weight=0.0))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    bonus, _ = gradients_of(packed, batch, algorithm=AlgorithmConfig(entropy_weight=1.0))
    assert measured.metrics["entropy"] == pytest.approx(measured.loss - bonus.loss, rel=1e-6)
    del plain


def test_entropy_by_hand():
    row = plan(random_batch(1, groups=1, size=1), micro_batch_tokens=100, share_prefixes=False)[0]
    count = len(row.targets)
    logits = torch.zeros(count, VOCABULARY, dtype=torch.float64)
    kept = Kept(counts=np.array([4] + [0] * (count - 1), np.int32), token_ids=np.arange(4, dtype=np.int32))
    wanted = Wanted.of(np.arange(count), np.arange(count), row, kept, logits.device)
    readings = read(logits, wanted, 1.0, "value")
    expected = [np.log(4)] + [np.log(VOCABULARY)] * (count - 1)
    assert readings.entropy.tolist() == pytest.approx(expected)
    assert (-readings.logprobs).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("entropy", [None, 0.1])
def test_no_pass_keeps_logits_for_the_other(entropy, monkeypatch):
    """What a forward pass keeps for its backward pass holds nothing of the vocabulary's width but the weights."""
    packed, _ = twins("qwen3")
    batch = with_kept(random_batch(14, groups=6, size=4))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", VOCABULARY * 4)
    weights = {p.data_ptr() for p in packed.parameters()}
    wide, heights = [], []
    packed.lm_head.register_forward_hook(lambda module, inputs, output: heights.append(output.shape[-2]))

    def pack(tensor):
        if VOCABULARY in tensor.shape and tensor.data_ptr() not in weights:
            wide.append(tuple(tensor.shape))
        return tensor

    [row] = plan(batch, micro_batch_tokens=10_000, share_prefixes=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        readings = logprobs.read_row(
            packed,
            row,
            kept=batch.kept.at(row.sources),
            entropy="none" if entropy is None else "gradient",
        )
    assert len(row.targets) > 40
    assert wide == []
    (readings.logprobs.sum() + (0.0 if readings.entropy is None else readings.entropy.sum())).backward()
    assert max(heights) == 4


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.data())
def test_kept_sets_are_taken_and_joined_like_lists(sizes, data):
    numbers = iter(range(1000))
    lists = [[next(numbers) for _ in range(size)] for size in sizes]
    ids = [token for each in lists for token in each]
    kept = Kept(counts=np.array(sizes, np.int32), token_ids=np.array(ids, np.int32))
    places = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    taken = kept.at(np.array(places, np.int64))
    assert taken.counts.tolist() == [sizes[place] for place in places]
    assert taken.token_ids.tolist() == [token for place in places for token in lists[place]]
    both = Kept.joined([(3, None), (len(sizes), kept), (len(places), taken)])
    assert both.counts.tolist() == [0, 0, 0, *sizes, *taken.counts.tolist()]
    assert both.token_ids.tolist() == kept.token_ids.tolist() + taken.token_ids.tolist()
    assert Kept.joined([(3, None), (0, None)]) is None
