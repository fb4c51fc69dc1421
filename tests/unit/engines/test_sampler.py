from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.sampler import draw, pick
from headrace.engines.requests import uniforms


def reference(logits: np.ndarray, sampling: Sampling, slack: float = 0.0) -> np.ndarray:
    """The sampled distribution, spelt out in float64; `slack` > 0 keeps what is within rounding of being kept."""
    scaled = logits.astype(np.float64) / sampling.temperature
    scaled[[t for t in sampling.forbidden if t < len(logits)]] = -np.inf
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    top_k = min(sampling.top_k or KEPT_LIMIT, KEPT_LIMIT) if sampling.record_kept else sampling.top_k
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    total, mass, kept = p[order].sum(), 0.0, []
    for i in order:
        if kept and mass >= (sampling.top_p + slack) * total:
            break
        kept.append(i)
        mass += p[i]
    kept = [i for i in kept if p[i] > 0 and p[i] >= (sampling.min_p - slack) * p.max()]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


def chi_square_bound(freedom: int) -> float:
    """What chi-square exceeds with a probability of 1e-4 (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3)


@pytest.mark.parametrize("vocabulary", [1, 255, 256, 257, 1000, 4096])
def test_blocks_of_ids_pick_what_one_cumulative_sum_picks(vocabulary: int) -> None:
    """Masses are small integers, so that all sums are exact. Most are 0, whole blocks of them."""
    rng = np.random.default_rng(vocabulary)
    masses = (rng.integers(0, 9, (200, vocabulary)) * (rng.random((200, vocabulary)) < 0.02)).astype(np.float32)
    masses[:, rng.integers(vocabulary)] += 1
    u = rng.random(200)
    u[:3] = 0.0, np.nextafter(1.0, 0.0), 0.5
    ids, total = pick(torch.from_numpy(masses), torch.from_numpy(u))
    for row, mass, part, id in zip(masses, total.tolist(), u, ids.tolist(), strict=True):
        cumulative = row.astype(np.float64).cumsum()
        assert mass == cumulative[-1]
        assert id == np.searchsorted(cumulative, part * mass, side="right") and row[id] > 0


RULES = [
    {},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.75},
    {"temperature": 1.5, "top_k": 6, "top_p": 0.8},
    {"top_k": 12, "top_p": 0.9},
    {"min_p": 0.3},
    {"top_p": 0.9, "min_p": 0.2, "forbidden": (1, 3), "record_kept": True},
]


@pytest.mark.parametrize("rule", RULES)
def test_frequencies_match_the_distribution(rule: dict) -> None:
    rows, vocabulary = 40_000, 12
    logits = np.random.default_rng(1).normal(size=vocabulary).astype(np.float32)
    sampling = Sampling(max_tokens=1, seed=7, **rule)
    expected = reference(logits, sampling)
    drawn = draw(torch.from_numpy(logits).expand(rows, -1), [sampling] * rows, range(rows))
    counts = np.bincount(drawn.tokens, minlength=vocabulary)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    statistic = ((counts[kept] - rows * expected[kept]) ** 2 / (rows * expected[kept])).sum()
    assert statistic < chi_square_bound(kept.sum() - 1)
    np.testing.assert_allclose(drawn.logprobs, np.log(expected[drawn.tokens]), atol=1e-5)


@settings(max_examples=300, deadline=None)
@given(
    # Quarters, few of them apart: many ties.
    logits=st.lists(st.integers(-12, 12), min_size=1, max_size=30),
    temperature=st.sampled_from([1.0, 0.25, 0.7, 3.0]),
    top_k=st.integers(0, 33),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    forbidden=st.sets(st.integers(1, 32), max_size=5),
    seed=st.integers(-(2**63), 2**64),
    position=st.integers(0, 100_000),
)
def test_every_rule_is_the_reference_in_float64(
    logits: list[int],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    forbidden: set[int],
    seed: int,
    position: int,
) -> None:
    values = np.array(logits, np.float32) / 4
    rule = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    sampling = Sampling(max_tokens=1, forbidden=tuple(forbidden), record_kept=True, **rule)
    drawn = draw(torch.from_numpy(values)[None], [sampling], [position])
    assert drawn.kept[0] is not None
    assert drawn.kept[0].tolist() == sorted(set(drawn.kept[0].tolist()))
    kept = set(drawn.kept[0].tolist())
    assert set(np.flatnonzero(reference(values, sampling, -1e-6))) <= kept
    assert kept <= set(np.flatnonzero(reference(values, sampling, 1e-6)))

    expected = reference(values, Sampling(max_tokens=1, temperature=temperature))
    expected[[i for i in range(len(values)) if i not in kept]] = 0
    expected /= expected.sum()
    token = drawn.tokens[0]
    assert drawn.logprobs[0] == pytest.approx(np.log(expected[token]), abs=1e-5)
    noise = uniforms([seed], [position])[0]
    assert expected[:token].sum() - 1e-6 <= noise <= expected[: token + 1].sum() + 1e-6
    unrecorded = draw(
        torch.from_numpy(values)[None], [Sampling(max_tokens=1, forbidden=tuple(forbidden), **rule)], [position]
    )
    assert unrecorded.tokens[0] == token and unrecorded.kept == [None]


def test_equal_tokens_are_kept_by_id_and_shares_are_exact() -> None:
    logits = torch.zeros(1, 10)
    for rule, ids in (
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.8}, list(range(8))),
        ({"top_p": 0.0}, [0]),
        ({"top_k": 5, "top_p": 0.6}, [0, 1, 2]),
        ({"top_k": 3, "forbidden": (0, 2)}, [1, 3, 4]),
        ({"min_p": 1.0, "forbidden": (9, 10, 4000)}, list(range(9))),
    ):
        drawn = draw(logits, [Sampling(max_tokens=1, record_kept=True, **rule)], [0])
        assert drawn.kept[0] is not None and drawn.kept[0].tolist() == ids
        assert drawn.logprobs[0] == pytest.approx(-np.log(len(ids)), abs=1e-6)


def test_no_more_than_the_limit_are_recorded() -> None:
    logits = torch.randn(1, 1500, generator=torch.Generator().manual_seed(0))
    best = sorted(logits[0].topk(KEPT_LIMIT).indices.tolist())
    for top_k, number in ((0, KEPT_LIMIT), (KEPT_LIMIT + 10, KEPT_LIMIT), (20, 20)):
        drawn = draw(logits, [Sampling(max_tokens=1, top_k=top_k, record_kept=True)], [0])
        assert drawn.kept[0] is not None and len(drawn.kept[0]) == number
        assert number < KEPT_LIMIT or drawn.kept[0].tolist() == best
        share = torch.log_softmax(logits[0, drawn.kept[0]].double(), -1)
        assert drawn.logprobs[0] == pytest.approx(share[drawn.kept[0].tolist().index(drawn.tokens[0])].item(), abs=1e-5)


def test_noise_is_uniform_and_uncorrelated_over_positions_and_seeds() -> None:
    for seeds, positions in ((list(range(50_000)), [3] * 50_000), ([3] * 50_000, list(range(50_000)))):
        u = uniforms(seeds, positions)
        assert u.min() >= 0 and u.max() < 1
        counts = np.bincount((u * 64).astype(int), minlength=64)
        assert ((counts - 50_000 / 64) ** 2 / (50_000 / 64)).sum() < chi_square_bound(63)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    # Neither seed + position nor seed ^ position alone decides.
    assert len({float(uniforms([s], [p])[0]) for s in range(20) for p in range(20)}) == 400
    assert uniforms([-1], [5]) == uniforms([2**64 - 1], [5])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63),
    position=st.integers(0, 10_000),
    rule=st.sampled_from([*RULES, {"temperature": 0.0}]),
    neighbours=st.integers(0, 8),
)
def test_a_draw_depends_on_nothing_beside_it(seed: int, position: int, rule: dict, neighbours: int) -> None:
    rng = np.random.default_rng(abs(seed) % 1000)
    logits = torch.from_numpy(rng.normal(size=(neighbours + 1, 50)).astype(np.float32)) * 3
    mine = Sampling(max_tokens=1, seed=seed, **rule)
    others = [Sampling(max_tokens=1, seed=i, **RULES[i]) for i in range(neighbours)]
    alone = draw(logits[:1], [mine], [position])
    together = draw(logits, [mine, *others], [position, *range(neighbours)])
    assert alone.tokens[0] == together.tokens[0]
    assert alone.logprobs[0] == together.logprobs[0]
    assert (alone.kept[0] is None) == (together.kept[0] is None)
    if alone.kept[0] is not None and together.kept[0] is not None:
        assert alone.kept[0].tolist() == together.kept[0].tolist()


def test_greedy_takes_the_best_and_reports_the_untempered_probability() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 3.0]])
    greedy = {"max_tokens": 1, "temperature": 0.0, "top_k": 1, "top_p": 0.1, "min_p": 0.9}
    drawn = draw(logits, [Sampling(**greedy)], [0])
    assert drawn.tokens.tolist() == [4]
    assert drawn.logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[0, 4].item(), abs=1e-6)
    # The first of two equals; what is forbidden has no share; there is no truncation to record.
    drawn = draw(logits, [Sampling(**greedy, forbidden=(4,), record_kept=True)], [0])
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs[0] == pytest.approx(torch.log_softmax(logits[:, :4], -1)[0, 1].item(), abs=1e-6)
    assert drawn.kept[0] is not None and len(drawn.kept[0]) == 0


@pytest.mark.parametrize("scale", [0.01, 4.0])
def test_top_p_over_a_large_vocabulary(scale: float) -> None:
    # A flat distribution needs more than the best thousand tokens, a peaked one does not: both must be exact.
    vocabulary, rows = 5000, 8
    logits = (np.random.default_rng(2).normal(size=(rows, vocabulary)) * scale).astype(np.float32)
    samplings = [Sampling(max_tokens=1, top_p=0.8, seed=i) for i in range(rows)]
    drawn = draw(torch.from_numpy(logits), samplings, range(rows))
    for row, token in enumerate(drawn.tokens):
        expected = reference(logits[row], samplings[row])
        assert expected[token] > 0
        assert drawn.logprobs[row] == pytest.approx(np.log(expected[token]), abs=1e-4)
        assert expected[:token].sum() - 1e-5 <= uniforms([row], [row])[0] <= expected[: token + 1].sum() + 1e-5


def test_a_low_temperature_keeps_its_precision() -> None:
    logits = torch.tensor([[30.0, 29.99, 29.0, 0.0]])
    sampling = Sampling(max_tokens=1, temperature=0.01)
    drawn = draw(logits.expand(50, -1), [sampling] * 50, range(50))
    expected = torch.log_softmax((logits[0].double()) / 0.01, -1).numpy()
    np.testing.assert_allclose(drawn.logprobs, expected[drawn.tokens], atol=1e-5)
    assert set(drawn.tokens.tolist()) == {0, 1}


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((2000, 5), float("-inf"))
    logits[:, 2] = 0.0
    logits[:, 3] = 1.0
    for rule in ({}, {"top_k": 4, "record_kept": True}):
        drawn = draw(logits, [Sampling(max_tokens=1, seed=i, **rule) for i in range(2000)], [0] * 2000)
        assert set(drawn.tokens.tolist()) == {2, 3}
        assert not rule or all(kept is not None and kept.tolist() == [2, 3] for kept in drawn.kept)


def test_broken_logits_show_in_the_log_probability() -> None:
    for rule in ({}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 2, "min_p": 0.1, "record_kept": True}):
        for logits in (torch.full((1, 5), float("nan")), torch.tensor([[1.0, float("nan"), 0.0, 2.0, 1.0]])):
            drawn = draw(logits, [Sampling(max_tokens=1, **rule)], [0])
            assert np.isnan(drawn.logprobs[0])
            assert 0 <= drawn.tokens[0] < 5
    everything = Sampling(max_tokens=1, forbidden=tuple(range(5)))
    assert np.isnan(draw(torch.zeros(1, 5), [everything], [0]).logprobs[0])
