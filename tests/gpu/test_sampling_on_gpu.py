from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.kernels.sampling import SamplingRows, sample
from headrace.engines.embedded.sampler import draw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIXED: list[dict] = [
    {},
    {"temperature": 0.0, "forbidden": (7,)},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 50},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.7, "record_kept": True},
    {"min_p": 0.05, "record_kept": True},
    {"top_p": 0.95, "record_kept": True},
    {"forbidden": tuple(range(0, 96, 3)), "top_p": 0.5, "min_p": 0.01},
    {"top_k": 2000, "top_p": 0.99},
]


def on_device(samplings: list[Sampling]) -> tuple[SamplingRows, torch.Tensor]:
    params = SamplingRows(len(samplings) + 1, "cuda")
    rows = torch.arange(len(samplings)).flip(0)
    params.set(rows.pin_memory(), samplings)
    return params, rows.to("cuda", torch.int32)


@pytest.mark.parametrize("vocabulary", [49152, 151936, 50257])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_mixed_rows_are_drawn_like_the_reference(vocabulary: int, dtype: torch.dtype, scale: float) -> None:
    batch = 72
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(batch, vocabulary, generator=generator) * scale).to(dtype)
    samplings = [Sampling(max_tokens=1, seed=i - 2**62, **MIXED[i % len(MIXED)]) for i in range(batch)]
    positions = [100 + 7 * i for i in range(batch)]
    expected = draw(logits, samplings, positions)

    params, rows = on_device(samplings)
    ids = torch.full((batch, KEPT_LIMIT), -7, dtype=torch.int32, device="cuda")
    counts = torch.full((batch,), -7, dtype=torch.int32, device="cuda")
    places = torch.tensor(positions, dtype=torch.int32, device="cuda")
    tokens, logprobs = sample(logits.cuda(), rows, places, params, filtered=True, kept_ids=ids, kept_counts=counts)
    assert tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(logprobs.cpu().numpy(), expected.logprobs, atol=2e-5)
    for row, kept in enumerate(expected.kept):
        assert ids[row, : counts[row]].tolist() == ([] if kept is None else kept.tolist())


@pytest.mark.parametrize("vocabulary", [49152, 151936])
def test_unfiltered_rows_are_drawn_like_the_reference(vocabulary: int) -> None:
    batch = 128
    logits = (torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(1)) * 2).bfloat16()
    samplings = [Sampling(max_tokens=1, seed=i, temperature=(1.0, 0.0, 0.5, 1.5)[i % 4]) for i in range(batch)]
    expected = draw(logits, samplings, range(batch))
    params, rows = on_device(samplings)
    positions = torch.arange(batch, dtype=torch.int32, device="cuda")
    tokens, logprobs = sample(logits.cuda(), rows, positions, params, filtered=False)
    assert tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(logprobs.cpu().numpy(), expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("rule", [{}, {"top_k": 12}, {"temperature": 1.5, "top_k": 30, "top_p": 0.8}, {"min_p": 0.2}])
def test_frequencies_match_the_distribution(rule: dict) -> None:
    rows, vocabulary = 8192, 49152
    # Sixteen likely tokens, far apart over the vocabulary.
    logits = torch.full((vocabulary,), -30.0)
    likely = torch.arange(16) * 3001 + 17
    logits[likely] = torch.randn(16, generator=torch.Generator().manual_seed(2))
    shares, order = torch.softmax(logits.double() / rule.get("temperature", 1.0), 0).sort(descending=True, stable=True)
    shares = shares[: rule.get("top_k", vocabulary)]
    shares = shares / shares.sum()
    shares = shares[(shares.cumsum(0) - shares) < rule.get("top_p", 1.0)]
    shares = shares[shares >= rule.get("min_p", 0.0) * shares[0]][:16]
    shares, order = shares / shares.sum(), order[: len(shares)]

    params, device_rows = on_device([Sampling(max_tokens=1, seed=seed, **rule) for seed in range(rows)])
    positions = torch.full((rows,), 3, dtype=torch.int32, device="cuda")
    batch = logits.cuda().expand(rows, -1).contiguous()
    tokens, _ = sample(batch, device_rows, positions, params, filtered=bool(rule))
    counts = torch.bincount(tokens.cpu().long(), minlength=vocabulary)[order]
    assert counts.sum() == rows
    statistic = float(((counts - rows * shares) ** 2 / (rows * shares)).sum())
    freedom = len(shares) - 1
    assert freedom >= 3
    # Exceeded with a probability of 1e-4 (Wilson and Hilferty).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("filtered", [False, True])
def test_a_captured_call_sees_new_logits_and_new_parameters(filtered: bool) -> None:
    batch, vocabulary = 64, 49152
    params = SamplingRows(batch, "cuda")
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    positions = torch.zeros(batch, dtype=torch.int32, device="cuda")
    logits = torch.randn(batch, vocabulary, device="cuda", dtype=torch.bfloat16)
    sample(logits, rows, positions, params, filtered=filtered)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sample(logits, rows, positions, params, filtered=filtered)
    for turn in range(3):
        rule: dict = {"top_p": 0.5 + 0.2 * turn} if filtered else {"temperature": 0.5 + turn}
        samplings = [Sampling(max_tokens=1, seed=turn * 1000 + i, **rule) for i in range(batch)]
        params.set(torch.arange(batch).pin_memory(), samplings)
        fresh = torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(turn)).bfloat16()
        logits.copy_(fresh)
        positions.fill_(turn)
        graph.replay()
        expected = draw(fresh, samplings, [turn] * batch)
        assert tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_allclose(logprobs.cpu().numpy(), expected.logprobs, atol=2e-5)


def test_broken_logits_end_with_nan_and_a_valid_id() -> None:
    rules = [{"top_k": 5, "record_kept": True}, {"top_p": 0.5}, {}, {"temperature": 0.0}]
    for value in ("nan", "inf", "-inf"):
        for filtered in (False, True):
            logits = torch.full((4, 49152), float(value), device="cuda")
            logits[1], logits[1, 7] = 1.0, float("nan")
            params, rows = on_device([Sampling(max_tokens=1, **rule) for rule in rules])
            tokens, logprobs = sample(
                logits, rows, torch.zeros(4, dtype=torch.int32, device="cuda"), params, filtered=filtered
            )
            assert logprobs.isnan().all()
            assert (tokens >= 0).all() and (tokens < 49152).all()
