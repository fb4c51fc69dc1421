"""The plugin's truncation against the embedded engine's, which defines it, and against a plain loop."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.base import Sampling
from headrace.engines.embedded.sampler import draw
from headrace.engines.vllm.sampling import FORBID
from headrace_vllm_plugin.truncation import kept, truncate, wanted
from headrace_vllm_plugin.wire import TRUNCATION, Truncation

# Quarters and temperatures of powers of two: tempered logits are the same to the bit on both sides, and often equal.
LOGITS = st.lists(st.integers(-16, 16).map(lambda quarters: quarters / 4), min_size=2, max_size=24)
RULES = st.builds(
    Truncation,
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([0.001, 0.1, 0.25, 0.3, 0.5, 0.6, 0.8, 0.85, 0.97, 1.0]),
    min_p=st.sampled_from([0.001, 0.1, 0.3, 0.5, 0.8, 1.0]),
)


def tempered(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """As they come to the plugin: forbidden tokens by the bias that the driver sends."""
    biased = logits.clone()
    biased[..., list(sampling.forbidden)] += FORBID
    return biased / sampling.temperature


def by_the_engine(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    [ids] = draw(logits[None], [sampling], [0]).kept
    assert ids is not None
    return ids.tolist()


@given(LOGITS, RULES, st.sampled_from([0.5, 1.0, 2.0]), st.sets(st.integers(0, 1), max_size=1))
def test_the_same_tokens_stay_as_in_the_embedded_engine(
    values: list[float], rule: Truncation, temperature: float, forbidden: set[int]
) -> None:
    sampling = Sampling(
        max_tokens=1, temperature=temperature, top_k=rule.top_k, top_p=rule.top_p, min_p=rule.min_p,
        forbidden=tuple(forbidden), record_kept=True,
    )  # fmt: skip
    logits = torch.tensor(values)
    mine = kept(tempered(logits, sampling)[None], rule)[0].nonzero()[:, 0].tolist()
    assert mine == by_the_engine(logits, sampling)


def test_top_p_is_of_what_top_k_left_and_min_p_looks_last() -> None:
    masses = torch.tensor([0.3, 0.02, 0.28, 0.2, 0.12, 0.08])
    rule = Truncation(top_k=4, top_p=0.7, min_p=0.5)
    # top_k leaves 0.9, of which top_p takes 0.63: the third is the last that begins below it. min_p: at least 0.15.
    # (Were min_p first, it would leave 0.78, of which two tokens make 0.7.)
    assert kept(masses.log()[None], rule)[0].nonzero()[:, 0].tolist() == [0, 2, 3]


def test_rows_are_cut_by_their_own_rules_and_others_are_left_alone() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 3000) * 3
    rules = {Truncation(top_k=40, top_p=0.9, min_p=0.05): [4, 0], Truncation(top_p=0.6, min_p=0.02): [3]}
    cut = logits / 1.4
    truncate(cut, rules)
    assert torch.equal(cut[[1, 2, 5]], logits[[1, 2, 5]] / 1.4)
    for rule, rows in rules.items():
        for row in rows:
            sampling = Sampling(
                max_tokens=1, temperature=1.4, top_k=rule.top_k, top_p=rule.top_p, min_p=rule.min_p, seed=row
            )
            left = by_the_engine(logits[row], msgspec.structs.replace(sampling, record_kept=True))
            assert cut[row].isfinite().nonzero()[:, 0].tolist() == left and 1 < len(left) < 100
            drawn = draw(logits[row][None], [sampling], [7])
            logprobs = cut[row].log_softmax(-1)
            np.testing.assert_allclose(logprobs[drawn.tokens].numpy(), drawn.logprobs, atol=1e-5)


def params(temperature: float = 1.0, **extra_args: object) -> SimpleNamespace:
    return SimpleNamespace(temperature=temperature, extra_args=extra_args or None)


def test_a_request_says_what_it_wants_and_nonsense_is_refused() -> None:
    rule = {"top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert wanted(params(**{TRUNCATION: rule})) == Truncation(5, 0.9, 0.1)
    assert wanted(params()) is wanted(params(other=1)) is None
    assert wanted(params(temperature=0.0, **{TRUNCATION: rule})) is None, "the best token is taken, among all"
    for wrong in ({"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"min_p": "0.1"}, [5], "all"):
        with pytest.raises(ValueError, match="Expected"):
            wanted(params(**{TRUNCATION: wrong}))
