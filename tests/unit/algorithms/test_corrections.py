"""Corrections alone, by hand, and on the plainest of losses."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headrace.algorithms.losses.base import TokenInputs, build_loss, icepop, mis, opsm, sequence_tis, tis
from headrace.config.schema import AlgorithmConfig

RATIOS = [0.4, 0.5001, 1.0, 1.9, 4.9, 5.1]


def inputs_of(ratios=RATIOS, advantages=None, sequences=None):
    behaviour = torch.full((len(ratios),), -3.0, dtype=torch.float64)
    logprobs = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    return TokenInputs(
        logprobs=logprobs.requires_grad_(),
        behaviour=behaviour,
        advantages=torch.tensor(advantages or [1.0] * len(ratios), dtype=torch.float64),
        sequences=torch.tensor(sequences or list(range(len(ratios)))),
        lags=torch.zeros_like(behaviour),
    )


def plain_ratio(**changes):
    """-r A: GRPO whose clip is out of the way."""
    return build_loss(AlgorithmConfig(loss="grpo", clip_low=1.0, clip_high=1e9, **changes))


def slopes(loss, inputs):
    result = loss(inputs)
    [found] = torch.autograd.grad(result.values.sum(), inputs.logprobs)
    torch.testing.assert_close(found, result.values.detach())
    return found.tolist(), result.sums


def test_tis_bounds_the_importance_weight():
    inputs = inputs_of()
    verdict = tis(inputs, cap=2.0)
    assert verdict.cap.tolist() == [2.0] * len(RATIOS)
    assert verdict.kept.all()
    found, sums = slopes(plain_ratio(corrections=["tis"]), inputs)
    assert found == pytest.approx([-0.4, -0.5001, -1.0, -1.9, -2.0, -2.0], abs=1e-12)
    assert float(sums["tis_fraction"]) == 2
    # The metric stays that of what was recorded.
    assert float(sums["ratio"]) == pytest.approx(sum(RATIOS))
    found, _ = slopes(plain_ratio(corrections=["tis"], tis_cap=1.0), inputs)
    assert found == pytest.approx([-0.4, -0.5001, -1, -1, -1, -1], abs=1e-12)


def test_tis_holds_where_grpo_does_not_clip():
    """A bad token that has become likelier has an unbounded ratio in GRPO."""
    inputs = inputs_of([30.0], [-1.0])
    for corrections, expected in [([], 30.0), (["tis"], 2.0)]:
        values = build_loss(AlgorithmConfig(loss="grpo", corrections=corrections))(inputs).values
        assert values.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("corrections", [[], ["tis"]])
def test_tis_widens_no_trust_region(corrections):
    """What a loss clips or masks follows from the recorded log-probabilities, with `tis` and without."""

    def slope(loss, inputs, **changes):
        config = AlgorithmConfig(loss=loss, corrections=corrections, **changes)
        [found] = torch.autograd.grad(build_loss(config)(inputs).values.sum(), inputs.logprobs)
        return found.tolist()

    limit = 2.0 if corrections else 6.0
    inputs = inputs_of([6.0, 6.0], [1.0, -1.0])
    behaviour = torch.full_like(inputs.behaviour, math.log(0.05))
    inputs = inputs._replace(behaviour=behaviour, logprobs=(behaviour + math.log(6)).requires_grad_())
    # From .05 to .30 is further than .2: in the direction of its advantage a token gets no gradient.
    assert slope("dppo_tv", inputs) == pytest.approx([0.0, limit])
    assert slope("grpo", inputs, clip_high=3.0) == pytest.approx([0.0, limit])
    # The geometric mean of a sequence with one ratio of 16 is 4, far outside of its clip.
    inputs = inputs_of([16.0, 1.0, 16.0, 1.0], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1])
    limit = 2.0 if corrections else 4.0
    assert slope("gspo", inputs) == pytest.approx([0.0, 0.0, limit, limit])
    assert slope("gspo", inputs, clip_high=2.5) == pytest.approx([0.0, 0.0, limit, limit])


@pytest.mark.parametrize("corrections", [[], ["tis"]])
def test_friction_50_tis_does_not_widen_the_trust_region_of_dppo_tv(corrections):
    """From 0.05 to 0.30 is further than 0.2, so a token with a positive advantage has no gradient."""
    mu, pi = torch.tensor([0.05], dtype=torch.float64), torch.tensor([0.30], dtype=torch.float64)
    inputs = inputs_of([6.0])._replace(behaviour=mu.log(), logprobs=pi.log().requires_grad_())
    loss = build_loss(AlgorithmConfig(loss="dppo_tv", corrections=corrections))
    [gradient] = torch.autograd.grad(loss(inputs).values.sum(), inputs.logprobs)
    assert gradient.tolist() == [0.0]


def test_sequence_tis_gives_every_token_the_weight_of_its_sequence():
    # Products 6, 0.9 and 0.05; geometric means 2.45, 0.95 and 0.22.
    ratios, sequences = [3.0, 2.0, 0.6, 1.5, 0.5, 0.1], [0, 0, 1, 1, 2, 2]
    inputs = inputs_of(ratios, sequences=sequences)
    found, sums = slopes(plain_ratio(corrections=["sequence_tis"]), inputs)
    assert found == pytest.approx([-2, -2, -0.9, -0.9, -0.05, -0.05], abs=1e-12)
    assert float(sums["sequence_tis_fraction"]) == 2, "only the first sequence was truncated"
    low = {"sequence_tis_low": 0.5, "sequence_tis_high": 1.5}
    found, sums = slopes(plain_ratio(corrections=["sequence_tis"], **low), inputs)
    assert found == pytest.approx([-1.5, -1.5, -0.9, -0.9, -0.5, -0.5], abs=1e-12)
    assert float(sums["sequence_tis_fraction"]) == 4
    found, _ = slopes(plain_ratio(corrections=["sequence_tis"], sequence_tis_ratio="mean", **low), inputs)
    mean = 0.9**0.5
    assert found == pytest.approx([-1.5, -1.5, -mean, -mean, -0.5, -0.5], abs=1e-12)
    verdict = sequence_tis(inputs, low=0.5, high=1.5, ratio="product")
    assert verdict.cap.tolist() == verdict.floor.tolist() == pytest.approx([1.5, 1.5, 0.9, 0.9, 0.5, 0.5])
    # A cap for tokens holds beside it, and what is exempt keeps its own ratio.
    found, _ = slopes(plain_ratio(corrections=["tis", "sequence_tis"], tis_cap=1.2, **low), inputs)
    assert found == pytest.approx([-1.2, -1.2, -0.9, -0.9, -0.5, -0.5], abs=1e-12)
    old = inputs._replace(lags=torch.tensor([0.0, 3, 0, 0, 0, 0], dtype=torch.float64))
    config = AlgorithmConfig(loss="grpo", clip_low=1.0, clip_high=1e9, corrections=["sequence_tis"], **low)
    found, _ = slopes(build_loss(config, correct_above=2), old)
    assert found == pytest.approx([-3.0, -1.5, -0.6, -1.5, -0.5, -0.1], abs=1e-12)


def test_icepop_leaves_out_what_is_out_of_range():
    inputs = inputs_of()
    assert icepop(inputs, low=0.5, high=5.0).kept.tolist() == [False, True, True, True, True, False]
    found, sums = slopes(plain_ratio(corrections=["icepop"]), inputs)
    assert found == pytest.approx([0, -0.5001, -1.0, -1.9, -4.9, 0], abs=1e-12)
    assert float(sums["icepop_fraction"]) == 2
    found, _ = slopes(plain_ratio(corrections=["icepop"], icepop_low=0.9, icepop_high=1.5), inputs)
    assert found == pytest.approx([0, 0, -1.0, 0, 0, 0], abs=1e-12)


def test_mis_leaves_out_whole_sequences():
    # Products 1.2, 2.25, 0.1; geometric means about 1.1, 1.5, 0.32.
    ratios, sequences = [3.0, 0.4, 1.5, 1.5, 0.5, 0.2], [0, 0, 1, 1, 2, 2]
    inputs = inputs_of(ratios, sequences=sequences)
    product, mean = "product", "mean"
    for ratio, low, high, kept in [
        (product, 0.0, 2.0, [True, False, True]),
        (product, 0.5, 2.0, [True, False, False]),
        (mean, 0.0, 2.0, [True, True, True]),
        (mean, 0.5, 1.4, [True, False, False]),
        (mean, 0.3, 1.0, [False, False, True]),
    ]:
        found = mis(inputs, low=low, high=high, ratio=ratio).kept.tolist()
        assert found == [kept[s] for s in sequences]
    found, sums = slopes(plain_ratio(corrections=["mis"]), inputs)
    assert found == pytest.approx([-3.0, -0.4, 0, 0, -0.5, -0.2], abs=1e-12)
    assert float(sums["mis_fraction"]) == 2
    found, _ = slopes(plain_ratio(corrections=["mis"], mis_ratio="mean", mis_low=1.2), inputs)
    assert found == pytest.approx([0, 0, -1.5, -1.5, 0, 0], abs=1e-12)


def test_opsm_leaves_out_bad_sequences_that_the_policy_has_left():
    # Mean of log mu - log pi: log 2 for the first two, 0 for the third, -log 2 for the last.
    ratios, sequences = [0.25, 1.0, 0.25, 1.0, 2.0, 0.5, 2.0], [0, 0, 1, 1, 2, 2, 3]
    inputs = inputs_of(ratios, [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0], sequences)
    assert opsm(inputs, limit=1e-4).kept.tolist() == [False, False, True, True, True, True, True]
    assert opsm(inputs, limit=math.log(2) + 1e-9).kept.all()
    found, sums = slopes(plain_ratio(corrections=["opsm"]), inputs)
    assert found == pytest.approx([0, 0, -0.25, -1.0, 2.0, 0.5, 2.0], abs=1e-12)
    assert float(sums["opsm_fraction"]) == 2


def test_together_in_any_order_and_twice():
    inputs = inputs_of([0.4, 3.0, 1.0, 0.9, 6.0, 1.2], [1.0, -1.0, -2.0, -2.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2])
    names = ["tis", "icepop", "mis", "opsm"]
    # 0.4 and 6 are out of icepop's range, 3 is cut to 2, the second sequence is opsm's, and the third is mis's.
    expected = [0, 2.0, 0, 0, 0, 0]
    for order in itertools.permutations(names):
        found, _ = slopes(plain_ratio(corrections=[*order, order[0]]), inputs)
        assert found == pytest.approx(expected, abs=1e-12)


def test_corrections_touch_only_tokens_over_the_lag_they_are_set_for():
    lags = torch.tensor([0.0, 1, 2, 0, 1, 2], dtype=torch.float64)
    inputs = inputs_of([5.0, 5.0, 5.0, 0.1, 0.1, 0.1])._replace(lags=lags)

    def loss(above, *corrections):
        config = AlgorithmConfig(loss="grpo", clip_low=1.0, clip_high=1e9, corrections=list(corrections))
        return build_loss(config, above)

    found, sums = slopes(loss(1, "tis"), inputs)
    assert found == pytest.approx([-5.0, -5.0, -2.0, -0.1, -0.1, -0.1], abs=1e-12)
    assert float(sums["tis_fraction"]) == 1
    found, _ = slopes(loss(0, "tis", "icepop"), inputs)
    assert found == pytest.approx([-5.0, -2.0, -2.0, -0.1, 0.0, 0.0], abs=1e-12)
    found, _ = slopes(loss(None, "tis", "icepop"), inputs)
    assert found == pytest.approx([-2.0, -2.0, -2.0, 0.0, 0.0, 0.0], abs=1e-12)
    # A sequence is judged as a whole, by its young tokens too; only its old ones are left out for it.
    whole = inputs._replace(sequences=torch.tensor([0, 0, 0, 1, 1, 1]))
    found, _ = slopes(loss(1, "mis"), whole)
    assert found == pytest.approx([-5.0, -5.0, 0.0, -0.1, -0.1, -0.1], abs=1e-12)
