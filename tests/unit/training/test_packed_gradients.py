"""Packed rows against plain Hugging Face, one sequence at a time: values and gradients of the whole loss."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from random_models import FAMILIES, AllDouble, random_batch, twins
from reference_loop import batch_loss, sequence_logprobs

from headrace.algorithms.losses.base import LOSSES, build_loss
from headrace.config.declared import needs
from headrace.config.schema import AlgorithmConfig
from headrace.training import attention, logprobs
from headrace.training.policies import FrozenPolicy
from headrace.training.rows import plan, plan_scoring
from headrace.training.trainer import accumulate
from headrace.types import NO_VERSION

CISPO = AlgorithmConfig()


@pytest.fixture
def all_double():
    with AllDouble():
        yield


def gradients_of(model, batch, *, algorithm=CISPO, micro_batch_tokens=10_000, share_prefixes=True, others=None):
    model.zero_grad()
    result = accumulate(
        model,
        batch,
        build_loss(algorithm),
        micro_batch_tokens=micro_batch_tokens,
        share_prefixes=share_prefixes,
        policies={name: FrozenPolicy(other) for name, other in (others or {}).items()},
        entropy=needs(algorithm).entropy,
    )
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(model, batch, algorithm=CISPO, others=None):
    model.zero_grad()
    loss = batch_loss(model, batch, algorithm, others)
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found, expected):
    assert found.keys() == expected.keys()
    norm = torch.sqrt(sum(g.double().square().sum() for g in expected.values()))
    worst = max(float((found[n].double() - expected[n].double()).abs().max()) for n in expected)
    return worst / float(norm)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("joined", [0, 1000])
def test_exact_in_float64(family, joined, monkeypatch, all_double):
    monkeypatch.setattr(attention, "JOINED_TOKENS", joined)
    packed, plain = twins(family, torch.float64)
    batch = random_batch(1, temperature=0.8)
    result, found = gradients_of(packed, batch)
    loss, expected = reference_gradients(plain, batch)
    assert abs(result.loss - loss) < 1e-10
    assert relative_error(found, expected) < 1e-10


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", ["cispo", "grpo"])
def test_close_in_float32(family, loss):
    algorithm = AlgorithmConfig(loss=loss)
    packed, plain = twins(family)
    batch = random_batch(2, groups=4, size=4)
    result, found = gradients_of(packed, batch, algorithm=algorithm, micro_batch_tokens=64)
    assert result.micro_batches > 1
    expected_loss, expected = reference_gradients(plain, batch, algorithm)
    assert abs(result.loss - expected_loss) < 2e-6
    assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_neither_rows_nor_sharing_change_the_gradient(family, all_double):
    packed, _ = twins(family, torch.float64)
    batch = random_batch(3)
    whole, expected = gradients_of(packed, batch)
    for budget in (1, 30, 50):
        for share in (True, False):
            cut, found = gradients_of(packed, batch, micro_batch_tokens=budget, share_prefixes=share)
            assert cut.micro_batches > whole.micro_batches
            assert cut.tokens >= whole.tokens
            assert abs(cut.loss - whole.loss) < 1e-10
            assert relative_error(found, expected) < 1e-9
            for name, value in whole.metrics.items():
                assert cut.metrics[name] == pytest.approx(value, abs=1e-10)


def off_policy(batch, plain, spread=0.3):
    """Sampled by policies of several versions, a little off the model: most ratios are near 1, on either side."""
    rng = np.random.default_rng(1)
    logprobs = np.zeros(len(batch.token_ids))
    ends = np.cumsum(batch.lengths)
    with torch.no_grad():
        for start, end in zip(ends - batch.lengths, ends, strict=True):
            tokens = torch.tensor(batch.token_ids[start:end].astype("int64"))
            logprobs[start + 1 : end] = sequence_logprobs(plain, tokens, batch.temperature).numpy()
    noise = spread * rng.normal(size=len(logprobs))
    # Relative to some sequences the model has moved away as a whole.
    noise += np.repeat(rng.choice([0.0, 0.1], len(batch.lengths)), batch.lengths)
    versions = np.where(batch.trained, rng.integers(1, 5, len(logprobs)), NO_VERSION).astype(np.int32)
    logprobs = np.where(batch.trained, logprobs + noise, 0.0).astype(np.float32)
    return msgspec.structs.replace(batch, logprobs=logprobs, version=4, versions=versions)


def reordered(batch, order):
    """The same batch with its sequences in another order."""
    ends = np.cumsum(batch.lengths)
    index = np.concatenate([np.arange(ends[i] - batch.lengths[i], ends[i]) for i in order])
    per_token = ("token_ids", "trained", "logprobs", "versions", "advantages", "weights")
    changes = {name: getattr(batch, name)[index] for name in per_token}
    return msgspec.structs.replace(batch, lengths=batch.lengths[order], groups=batch.groups[order], **changes)


def perturbed(seed, family="llama"):
    """A policy near the one in training, twice: as `twins` gives it."""
    pair = twins(family, torch.float64)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in pair[0].parameters():
            p.add_(0.02 * torch.randn(p.shape, dtype=p.dtype, generator=noise))
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


ALONE, CORRECTED, PAID = {}, {"corrections": ["tis", "icepop", "mis", "opsm"]}, {"reward_kl": "k3"}
PAID |= {"corrections": ["sequence_tis"], "sequence_tis_low": 0.7, "sequence_tis_high": 1.4, "reward_kl_weight": 0.3}


@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        *itertools.product([*sorted(LOSSES), "recomputed"], [ALONE, CORRECTED]),
        *itertools.product(["cispo", "gspo", "recomputed"], [PAID, PAID | {"sequence_tis_ratio": "mean"}]),
    ],
    ids=str,
)
def test_every_loss_whatever_the_packing(loss, keys, all_double):
    """Values and gradients of whole steps equal the plain loop's, in any order, cut into rows of any size."""
    packed, plain = twins("llama", torch.float64)
    batch = off_policy(random_batch(7, groups=4), plain)
    given = {"mis_high": 1.2, "icepop_low": 0.8, "tis_cap": 1.3} | keys
    given |= {"loss": "decoupled_ppo", "proximal": "recomputed"} if loss == "recomputed" else {"loss": loss}
    algorithm = AlgorithmConfig(**given)
    asked = needs(algorithm)._asdict()
    others = {name: perturbed(seed) for seed, name in enumerate(("proximal", "teacher", "reference")) if asked[name]}
    packed_others, plain_others = ({name: pair[side] for name, pair in others.items()} for side in (0, 1))
    expected_loss, expected = reference_gradients(plain, batch, algorithm, plain_others)
    whole, _ = gradients_of(packed, batch, algorithm=algorithm, others=packed_others)
    for name in algorithm.corrections:
        assert 0 < whole.metrics[f"{name}_fraction"] < 1
    order = np.random.default_rng(0).permutation(len(batch.lengths))
    for each, budget, share in [(batch, 10_000, True), (batch, 1, True), (reordered(batch, order), 30, False)]:
        result, found = gradients_of(
            packed,
            each,
            algorithm=algorithm,
            micro_batch_tokens=budget,
            share_prefixes=share,
            others=packed_others,
        )
        assert (result.micro_batches == 1) == (budget == 10_000)
        assert abs(result.loss - expected_loss) < 1e-10
        assert relative_error(found, expected) < 1e-9
        for name, value in whole.metrics.items():
            assert result.metrics[name] == pytest.approx(value, abs=1e-10)


def test_sharing_computes_a_prompt_once():
    packed, _ = twins("llama")
    batch = random_batch(3, groups=1, size=4)
    shared, _ = gradients_of(packed, batch)
    alone, _ = gradients_of(packed, batch, share_prefixes=False)
    prompt = int(np.flatnonzero(batch.trained)[0])
    assert alone.tokens - shared.tokens == 3 * prompt
    # Nothing reads what the last trained token would have computed.
    assert alone.tokens == len(batch.token_ids) - 4


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_logits_in_chunks_change_nothing(family, monkeypatch, all_double):
    packed, plain = twins(family, torch.float64)
    batch = random_batch(4, temperature=1.3)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 61 * 7)
    result, found = gradients_of(packed, batch)
    loss, expected = reference_gradients(plain, batch)
    assert abs(result.loss - loss) < 1e-10
    assert relative_error(found, expected) < 1e-10


def test_chunks_never_hold_more_logits_than_allowed(monkeypatch):
    packed, _ = twins("llama")
    heights = []
    packed.lm_head.register_forward_hook(lambda module, inputs, output: heights.append(output.shape[-2]))
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 61 * 7)
    gradients_of(packed, random_batch(4))
    assert heights
    assert max(heights) == 7


def test_a_position_that_predicts_several_tokens_is_projected_once():
    packed, _ = twins("llama")
    heights = []
    packed.lm_head.register_forward_hook(lambda module, inputs, output: heights.append(output.shape[-2]))
    batch = random_batch(5, groups=1, size=4)
    gradients_of(packed, batch)
    assert heights == [batch.trained_tokens - 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_scoring_equals_plain_forward(family):
    packed, plain = twins(family)
    token_ids = np.random.default_rng(0).integers(3, 61, 23, dtype=np.int32)
    with torch.no_grad():
        found = logprobs.read_row(packed, plan_scoring(token_ids)).logprobs
        expected = sequence_logprobs(plain, torch.from_numpy(token_ids).long(), 1.0)
    assert float((found - expected).abs().max()) < 5e-6


def test_advantage_zero_gives_no_gradient_and_the_prefix_gets_all_of_it(all_double):
    packed, plain = twins("llama", torch.float64)
    batch = random_batch(6, groups=1, size=3)
    batch.advantages[:] = 0
    _, found = gradients_of(packed, batch)
    assert all(float(g.abs().max()) == 0 for g in found.values())
    batch.advantages[:] = np.where(batch.trained, 1.0, 0)
    [row] = plan(batch, micro_batch_tokens=1000, share_prefixes=True)
    assert row.segments[0].length == int(np.flatnonzero(batch.trained)[0])
    _, found = gradients_of(packed, batch)
    _, expected = reference_gradients(plain, batch)
    # A prompt's token that occurs nowhere else: all that its embedding learns comes through the shared prefix.
    name = "model.embed_tokens.weight"
    for token in set(row.token_ids[: row.segments[0].length]):
        torch.testing.assert_close(found[name][token], expected[name][token], rtol=1e-9, atol=1e-12)
