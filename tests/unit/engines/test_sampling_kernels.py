from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.kernels.sampling import FORBIDDEN_LIMIT, SamplingRows, sample
from headrace.engines.embedded.sampler import Drawn, draw
from headrace.engines.requests import uniforms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

MIXED = [
    {},
    {"temperature": 0.0, "top_k": 3, "forbidden": (7,), "record_kept": True},
    {"temperature": 0.6, "top_p": 0.9},
    {"top_k": 2},
    {"temperature": 1.4, "top_k": 40, "top_p": 0.7, "record_kept": True},
    {"min_p": 0.05, "record_kept": True},
    {"forbidden": tuple(range(0, 3 * FORBIDDEN_LIMIT, 3)), "top_p": 0.99, "min_p": 0.01},
]


def run(
    logits: torch.Tensor, samplings: list[Sampling], positions: list[int], *, filtered: bool = True
) -> tuple[Drawn, Drawn]:
    """The kernels' answer, with parameters in scattered device rows, and the reference's."""
    batch = len(samplings)
    params = SamplingRows(batch + 5, DEVICE)
    rows = torch.randperm(batch + 5, generator=torch.Generator().manual_seed(batch))[:batch]
    params.set(rows, samplings)
    ids = torch.full((batch, KEPT_LIMIT), -7, dtype=torch.int32, device=DEVICE)
    counts = torch.full((batch,), -7, dtype=torch.int32, device=DEVICE)
    recorders = {"kept_ids": ids, "kept_counts": counts} if filtered else {}
    tokens, logprobs = sample(
        logits.to(DEVICE, copy=True),
        rows.to(DEVICE, torch.int32),
        torch.tensor(positions, dtype=torch.int32, device=DEVICE),
        params,
        filtered=filtered,
        **recorders,
    )
    kept = [ids[i, : counts[i]].cpu().numpy() if s.record_kept else None for i, s in enumerate(samplings)]
    assert not filtered or all(counts[i] == 0 for i, s in enumerate(samplings) if not s.record_kept)
    return Drawn(tokens.cpu().numpy().astype(np.int64), logprobs.cpu().numpy(), kept), draw(
        logits, samplings, positions
    )


def assert_same(mine: Drawn, expected: Drawn) -> None:
    assert mine.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(mine.logprobs, expected.logprobs, atol=1e-5)
    for got, wanted in zip(mine.kept, expected.kept, strict=True):
        assert (got is None) == (wanted is None)
        assert got is None or wanted is None or got.tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [(300, torch.float32), (1000, torch.float16), (5001, torch.bfloat16)],
)
def test_mixed_rows_are_drawn_like_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(len(MIXED), vocabulary, generator=generator) * 3).to(dtype)
    samplings = [Sampling(max_tokens=1, seed=i * 2**61 - 5, **rule) for i, rule in enumerate(MIXED)]
    assert_same(*run(logits, samplings, list(range(10, 10 + len(MIXED)))))


def test_unfiltered_rows_are_drawn_like_the_reference() -> None:
    for vocabulary, dtype in ((300, torch.float32), (5000, torch.bfloat16), (2048, torch.float16)):
        logits = (torch.randn(12, vocabulary, generator=torch.Generator().manual_seed(3)) * 2).to(dtype)
        samplings = [Sampling(max_tokens=1, seed=-i, temperature=(0.0, 1.0, 0.3, 2.0)[i % 4]) for i in range(12)]
        assert_same(*run(logits, samplings, [i * 1000 for i in range(12)], filtered=False))


def test_ties_go_to_the_lowest_ids_across_tiles() -> None:
    # Few distinct values, zeros of both signs among them: the edge runs through thousands of equal tokens.
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-2, 3, (5, 4500), generator=generator).bfloat16()
    logits[:, ::2] *= -1.0
    logits[0] = 0.0
    rules: list[dict] = [
        {"top_k": 1000, "record_kept": True},
        {"top_k": 1000, "record_kept": True},
        {"top_k": 1024, "top_p": 0.5, "record_kept": True},
        {"top_p": 0.8},
        {"top_k": 4000, "top_p": 0.97},
    ]
    samplings = [Sampling(max_tokens=1, seed=i, **rule) for i, rule in enumerate(rules)]
    mine, expected = run(logits, samplings, [5] * 5)
    assert_same(mine, expected)
    assert mine.kept[0] is not None and mine.kept[0].tolist() == list(range(1000))


def test_edges_of_the_rules() -> None:
    lonely = torch.full((1, 300), float("-inf"))
    lonely[0, 123], lonely[0, 200] = -3.0, -4.0
    for logits, rule in (
        (lonely, {"top_k": 50, "top_p": 0.999, "record_kept": True}),
        (lonely, {"forbidden": (123,), "min_p": 0.5, "record_kept": True}),
        (torch.zeros(1, 300), {"top_p": 0.0, "record_kept": True}),
        (torch.zeros(1, 300), {"min_p": 1.0, "top_p": 0.1, "record_kept": True}),
        (torch.arange(300.0)[None] * 40, {"top_k": 100, "record_kept": True}),
        (torch.linspace(-1e-3, 1e-3, 300)[None], {"top_p": 0.5, "record_kept": True}),
        (torch.linspace(-1e38, 1e38, 300)[None], {"top_k": 5, "record_kept": True}),
    ):
        assert_same(*run(logits.bfloat16(), [Sampling(max_tokens=1, seed=3, **rule)], [11]))


def test_noise_at_both_ends_picks_what_may_be_drawn() -> None:
    u = uniforms(list(range(20_000)), [0] * 20_000)
    logits = torch.full((2, 4000), float("-inf"))
    logits[:, 1500], logits[:, 3000] = 0.0, 0.0
    samplings = [Sampling(max_tokens=1, seed=int(seed)) for seed in (u.argmin(), u.argmax())]
    for filtered in (False, True):
        mine, _ = run(logits, samplings, [0, 0], filtered=filtered)
        assert mine.tokens.tolist() == [1500, 3000]
        np.testing.assert_allclose(mine.logprobs, np.log(0.5), atol=1e-6)


# Triton's interpreter computes with numpy, which warns of what the test is about.
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_broken_logits_end_with_nan_and_a_valid_id() -> None:
    for value, filtered in (("nan", False), ("nan", True), ("-inf", True)):
        logits = torch.full((4, 300), float(value))
        logits[1], logits[1, 7] = 1.0, float("nan")
        logits[2] = 0.5
        rules = [{"top_k": 5, "record_kept": True}, {"top_p": 0.5}, {}, {"temperature": 0.0}]
        mine, _ = run(logits, [Sampling(max_tokens=1, **rule) for rule in rules], [0] * 4, filtered=filtered)
        assert np.isnan(mine.logprobs).tolist() == [True, True, False, True]
        assert all(0 <= token < 300 for token in mine.tokens)


@pytest.mark.parametrize("rule", [{}, {"temperature": 1.3, "min_p": 0.3, "forbidden": (0, 5)}])
def test_frequencies_match_the_distribution(rule: dict) -> None:
    # A few seeds only, for the interpreter's sake; `tests/gpu` takes thousands, and top-k and top-p too.
    rows, vocabulary = 100, 7
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(4))
    scaled = logits.double() / rule.get("temperature", 1.0)
    scaled[list(rule.get("forbidden", ()))] = -torch.inf
    share = torch.softmax(scaled, 0)
    share[share < rule.get("min_p", 0.0) * share.max()] = 0
    share /= share.sum()

    samplings = [Sampling(max_tokens=1, seed=seed, **rule) for seed in range(rows)]
    mine, _ = run(logits.expand(rows, -1).contiguous(), samplings, [9] * rows, filtered=bool(rule))
    counts = torch.bincount(torch.from_numpy(mine.tokens), minlength=vocabulary)
    kept = share > 0
    freedom = int(kept.sum()) - 1
    assert freedom >= 2 and counts[~kept].sum() == 0
    statistic = float(((counts - rows * share) ** 2 / (rows * share))[kept].sum())
    # Exceeded with a probability of 1e-4 (Wilson and Hilferty).
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom))) ** 3
