from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.base import Sampling
from headrace.engines.embedded.sampler import draw, uniforms


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The sampled distribution, spelt out in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")[: top_k or None]
    total, mass, kept = p[order].sum(), 0.0, []
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += p[i]
    out = np.zeros_like(p)
    out[kept] = p[kept] / mass
    return out


RULES = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.75), (1.5, 6, 0.8), (1.0, 12, 0.9)]


@pytest.mark.parametrize("rule", RULES)
def test_frequencies_match_the_distribution(rule: tuple[float, int, float]) -> None:
    temperature, top_k, top_p = rule
    rows, vocabulary = 40_000, 12
    logits = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32)
    expected = reference(logits, temperature, top_k, top_p)
    sampling = [Sampling(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=7)] * rows
    tokens, logprobs = draw(torch.from_numpy(logits).expand(rows, -1), sampling, range(rows))
    counts = np.bincount(tokens, minlength=vocabulary)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts[kept] - rows * expected[kept]) ** 2 / (rows * expected[kept])).sum()
    freedom = kept.sum() - 1
    # Six standard deviations of chi-square.
    assert statistic < freedom + 6 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)


def test_noise_is_uniform_and_uncorrelated_over_positions_and_seeds() -> None:
    for seeds, positions in ((list(range(50_000)), [3] * 50_000), ([3] * 50_000, list(range(50_000)))):
        u = uniforms(seeds, positions)
        assert u.min() >= 0 and u.max() < 1
        counts = np.bincount((u * 64).astype(int), minlength=64)
        assert ((counts - 50_000 / 64) ** 2 / (50_000 / 64)).sum() < 63 + 6 * np.sqrt(126)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    # Neither seed + position nor seed ^ position alone decides.
    assert len({float(uniforms([s], [p])[0]) for s in range(20) for p in range(20)}) == 400
    assert uniforms([-1], [5]) == uniforms([2**64 - 1], [5])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63),
    position=st.integers(0, 10_000),
    rule=st.sampled_from([*RULES, (0.0, 0, 1.0)]),
    neighbours=st.integers(0, 6),
)
def test_a_draw_depends_on_nothing_beside_it(
    seed: int, position: int, rule: tuple[float, int, float], neighbours: int
) -> None:
    rng = np.random.default_rng(abs(seed) % 1000)
    logits = torch.from_numpy(rng.normal(size=(neighbours + 1, 50)).astype(np.float32)) * 3
    mine = Sampling(max_tokens=1, temperature=rule[0], top_k=rule[1], top_p=rule[2], seed=seed)
    others = [
        Sampling(max_tokens=1, temperature=t, top_k=k, top_p=p, seed=i)
        for i, (t, k, p) in zip(range(neighbours), [*RULES, *RULES], strict=False)
    ]
    alone = draw(logits[:1], [mine], [position])
    together = draw(logits, [mine, *others], [position, *range(neighbours)])
    assert alone[0][0] == together[0][0]
    assert alone[1][0] == together[1][0]


def test_greedy_takes_the_best_and_reports_the_untempered_probability() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    tokens, logprobs = draw(logits, [Sampling(max_tokens=1, temperature=0.0, top_k=1, top_p=0.1)], [0])
    assert tokens.tolist() == [1]
    assert logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item(), abs=1e-6)


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_top_p_over_a_large_vocabulary(scale: float) -> None:
    # A flat distribution needs more than the best thousand tokens, a peaked one does not: both must be exact.
    vocabulary, rows = 5000, 8
    logits = (np.random.default_rng(2).normal(size=(rows, vocabulary)) * scale).astype(np.float32)
    samplings = [Sampling(max_tokens=1, top_p=0.8, seed=i) for i in range(rows)]
    tokens, logprobs = draw(torch.from_numpy(logits), samplings, range(rows))
    for row in range(rows):
        expected = reference(logits[row], 1.0, 0, 0.8)
        assert expected[tokens[row]] > 0
        assert logprobs[row] == pytest.approx(np.log(expected[tokens[row]]), abs=1e-4)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 5), float("-inf"))
    logits[:, 2] = 0.0
    logits[:, 3] = 1.0
    tokens, _ = draw(logits, [Sampling(max_tokens=1, seed=i) for i in range(2000)], [0] * 2000)
    assert set(tokens.tolist()) == {2, 3}


def test_broken_logits_show_in_the_log_probability() -> None:
    for rule in ({}, {"top_p": 0.5}, {"temperature": 0.0}):
        _, logprobs = draw(torch.full((1, 5), float("nan")), [Sampling(max_tokens=1, **rule)], [0])
        assert not np.isfinite(logprobs[0])
