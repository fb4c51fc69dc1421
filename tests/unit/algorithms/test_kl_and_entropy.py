"""What may be added to any loss: by hand, and in expectation against exact divergences of whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.algorithms.losses.base import LOSSES, TokenInputs, build_loss, divergence
from headrace.algorithms.losses.policy.distillation import distillation
from headrace.config.declared import Needs, needs
from headrace.config.schema import AlgorithmConfig


def distribution(seed, size=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dtype=torch.float64, generator=generator)


def kl(p, q):
    return (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()


def test_estimators_by_hand():
    # The policy finds the tokens twice, half and as likely as the reference does.
    gaps = torch.tensor([math.log(2), -math.log(2), 0.0], dtype=torch.float64)
    logp = torch.full((3,), -2.0, dtype=torch.float64).requires_grad_()
    d = math.log(2)
    for name, values, slopes in [
        ("k1", [d, -d, 0], [d, -d, 0]),
        ("k2", [d * d / 2, d * d / 2, 0], [d, -d, 0]),
        ("k3", [0.5 - 1 + d, 2 - 1 - d, 0], [1 - 0.5, 1 - 2, 0]),
    ]:
        found = divergence(logp, logp.detach() - gaps, name)
        torch.testing.assert_close(found.detach(), torch.tensor(values, dtype=torch.float64), rtol=0, atol=1e-12)
        [slope] = torch.autograd.grad(found.sum(), logp)
        torch.testing.assert_close(slope, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "backwards"), [("k1", False), ("k2", False), ("k3", True)])
def test_the_expected_gradient_is_that_of_a_divergence(name, backwards):
    """Summed over every token, weighted with the policy's own probabilities: nothing is left to chance."""
    logits, reference = distribution(0).requires_grad_(), distribution(1)
    logp = logits.log_softmax(-1)
    losses = divergence(logp, reference.log_softmax(-1), name)
    [found] = torch.autograd.grad((logp.detach().exp() * losses).sum(), logits)
    exact = kl(reference, logits) if backwards else kl(logits, reference)
    [expected] = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_expected_value_is_the_divergence(name):
    logits, reference = distribution(2), distribution(3)
    logp = logits.log_softmax(-1)
    found = (logp.exp() * divergence(logp, reference.log_softmax(-1), name)).sum()
    assert float(found) == pytest.approx(float(kl(logits, reference)), abs=1e-12)


def test_distillation_follows_the_gradient_of_the_divergence_from_the_teacher():
    logits, teacher = distribution(4).requires_grad_(), distribution(5)
    logp = logits.log_softmax(-1)
    still = logp.detach()
    inputs = TokenInputs(
        logp, still, torch.zeros_like(still), torch.arange(9), torch.zeros_like(still), teacher=teacher.log_softmax(-1)
    )
    result = distillation(inputs)
    [found] = torch.autograd.grad((still.exp() * result.values).sum(), logits)
    [expected] = torch.autograd.grad(kl(logits, teacher), logits)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def tokens(seed=6, count=12):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return -torch.rand(count, dtype=torch.float64, generator=generator) - 0.5

    return TokenInputs(
        logprobs=draw().requires_grad_(),
        behaviour=draw(),
        advantages=draw() + 1.0,
        sequences=torch.arange(count) // 3,
        lags=torch.zeros(count, dtype=torch.float64),
        reference=draw(),
        teacher=draw(),
        entropy=(-draw()).requires_grad_(),
    )


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_they_add_to_any_loss_and_its_corrections(name):
    inputs = tokens()
    corrections = ["icepop", "mis", "tis"]
    plain = build_loss(AlgorithmConfig(loss=name, corrections=corrections))(inputs)
    config = AlgorithmConfig(loss=name, corrections=corrections, kl="k2", kl_weight=0.3, entropy_weight=0.2)
    found = build_loss(config)(inputs)
    gap = inputs.logprobs - inputs.reference
    expected = plain.values + 0.3 * gap**2 / 2 - 0.2 * inputs.entropy
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-12)
    for array in (inputs.logprobs, inputs.entropy):
        slopes = [torch.autograd.grad(v.sum(), array, retain_graph=True)[0] for v in (found.values, expected)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
    assert found.sums["reference_kl"].item() == pytest.approx(float((gap**2 / 2).sum()))
    assert found.sums["entropy"].item() == pytest.approx(float(inputs.entropy.sum()))
    assert {key: found.sums[key] for key in plain.sums} == plain.sums


@pytest.mark.parametrize(("estimator", "paid"), [("k1", lambda d: d), ("k3", lambda d: math.exp(-d) - 1 + d)])
def test_a_token_pays_for_itself_and_for_what_follows(estimator, paid):
    """By hand, with two sequences: the advantages are lowered, and nothing else changes."""
    gaps = [0.5, -0.25, 1.0, 0.125, -0.5]
    mu = torch.full((5,), -2.0, dtype=torch.float64)
    sequences = torch.tensor([0, 0, 0, 1, 1])
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    reference = mu - torch.tensor(gaps, dtype=torch.float64)
    logp = (mu + 0.1).requires_grad_()
    inputs = TokenInputs(logp, mu, advantages, sequences, torch.zeros_like(mu), reference=reference)
    a, b, c, d, e = (0.2 * paid(gap) for gap in gaps)
    lowered = advantages - torch.tensor([a + b + c, b + c, c, d + e, e], dtype=torch.float64)
    for loss in ("grpo", "cispo"):
        config = AlgorithmConfig(loss=loss, reward_kl=estimator, reward_kl_weight=0.2, corrections=["opsm"])
        found = build_loss(config)(inputs)
        plain = build_loss(AlgorithmConfig(loss=loss, corrections=["opsm"]))(inputs._replace(advantages=lowered))
        torch.testing.assert_close(found.values, plain.values, rtol=0, atol=1e-12)
        slopes = [torch.autograd.grad(v.values.sum(), logp, retain_graph=True)[0] for v in (found, plain)]
        torch.testing.assert_close(*slopes, rtol=0, atol=1e-12)
        assert float(found.sums["reward_kl"]) == pytest.approx((a + b + c + d + e) / 0.2)
    assert needs(AlgorithmConfig(reward_kl=estimator)) == Needs(reference=True)


def test_the_expected_gradient_of_rewards_that_pay_is_that_of_the_divergence():
    """On-policy, over all sequences of two tokens: REINFORCE with k1 in the reward follows KL(pi || reference)."""
    size = 4
    first, then = distribution(11, size).requires_grad_(), distribution(12, size * size).requires_grad_()
    other, other_then = distribution(13, size), distribution(14, size * size)
    second, other_second = then.view(size, size).log_softmax(-1), other_then.view(size, size).log_softmax(-1)
    pairs = [(x, y) for x in range(size) for y in range(size)]
    logp = torch.stack([v for x, y in pairs for v in (first.log_softmax(-1)[x], second[x, y])])
    reference = torch.stack([v for x, y in pairs for v in (other.log_softmax(-1)[x], other_second[x, y])])
    sequences = torch.arange(len(pairs)).repeat_interleave(2)
    none = torch.zeros_like(logp.detach())
    inputs = TokenInputs(logp, logp.detach(), none, sequences, none, reference=reference)
    values = build_loss(AlgorithmConfig(loss="reinforce", reward_kl="k1", reward_kl_weight=1.0))(inputs).values
    chance = logp.detach().view(-1, 2).sum(1).exp()
    found = torch.autograd.grad((chance.repeat_interleave(2) * values).sum(), (first, then), retain_graph=True)
    joint = logp.view(-1, 2).sum(1)
    exact = (joint.exp() * (joint - reference.view(-1, 2).sum(1))).sum()
    for mine, expected in zip(found, torch.autograd.grad(exact, (first, then)), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_components_add_up_to_the_loss():
    inputs = tokens()
    assert build_loss(AlgorithmConfig())(inputs).parts == {}
    policy = build_loss(AlgorithmConfig(corrections=["icepop"]))(inputs).values
    config = AlgorithmConfig(corrections=["icepop"], kl="k3", kl_weight=0.3, entropy_weight=0.2)
    found = build_loss(config)(inputs)
    torch.testing.assert_close(found.parts["policy"], policy, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.parts["entropy"], -0.2 * inputs.entropy.detach(), rtol=0, atol=1e-12)
    expected = 0.3 * divergence(inputs.logprobs, inputs.reference, "k3").detach()
    torch.testing.assert_close(found.parts["kl"], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(sum(found.parts.values()), found.values.detach(), rtol=0, atol=1e-12)


def test_weight_zero_only_measures():
    inputs = tokens()
    plain = build_loss(AlgorithmConfig())(inputs)
    measured = build_loss(AlgorithmConfig(entropy_weight=0.0))(inputs)
    assert torch.equal(measured.values, plain.values)
    assert measured.sums["entropy"].item() == pytest.approx(float(inputs.entropy.sum()))


def test_only_what_is_needed_is_asked_for():
    assert needs(AlgorithmConfig()) == Needs()
    assert needs(AlgorithmConfig(proximal="recomputed")) == Needs()
    assert needs(AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed")) == Needs(proximal=True)
    assert needs(AlgorithmConfig(loss="distillation", teacher="t", kl="k1")) == Needs(teacher=True, reference=True)
    assert needs(AlgorithmConfig(entropy_weight=0.0)) == Needs(entropy="value")
    assert needs(AlgorithmConfig(entropy_weight=0.01)) == Needs(entropy="gradient")
    assert needs(AlgorithmConfig(entropy_target=1.0)) == Needs(entropy="gradient")
