"""Losses against values computed by hand, and gradients against formulas worked out without the code under test."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.algorithms.losses.base import LOSSES, build_loss
from headrace.algorithms.losses.cispo import cispo
from headrace.algorithms.losses.grpo import clipped_grpo
from headrace.algorithms.losses.imitation import imitation
from headrace.config.schema import AlgorithmConfig

LOW, HIGH = 0.2, 0.28
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5, 3.0]
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (2.0, -1.0)]


def arrays():
    behaviour = torch.full((len(CASES),), -1.25, dtype=torch.float64)
    ratios = torch.tensor([ratio for ratio, _ in CASES], dtype=torch.float64)
    advantages = torch.tensor([advantage for _, advantage in CASES], dtype=torch.float64)
    return (behaviour + ratios.log()).requires_grad_(), behaviour, advantages


def gradient(values, logprobs):
    return torch.autograd.grad(values.sum(), logprobs)[0]


def test_cispo_by_hand():
    logprobs, behaviour, advantages = arrays()
    result = cispo(logprobs, behaviour, advantages, clip_high=HIGH)
    expected = [-min(r, 1.28) * a * (-1.25 + math.log(r)) for r, a in CASES]
    torch.testing.assert_close(result.values.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    slopes = [-min(r, 1.28) * a for r, a in CASES]
    found = gradient(result.values, logprobs)
    torch.testing.assert_close(found, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-12)


def test_grpo_by_hand():
    logprobs, behaviour, advantages = arrays()
    result = clipped_grpo(logprobs, behaviour, advantages, clip_low=LOW, clip_high=HIGH)
    expected = [-min(r * a, min(max(r, 0.8), 1.28) * a) for r, a in CASES]
    torch.testing.assert_close(result.values.detach(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    # Only a token that has gone too far in the direction of its advantage loses its gradient.
    silent = {(1.5, 2.0), (3.0, 2.0), (0.5, -1.0)}
    slopes = [0.0 if (r, a) in silent else -r * a for r, a in CASES]
    found = gradient(result.values, logprobs)
    torch.testing.assert_close(found, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-12)


def test_metrics_by_hand_and_over_micro_batches():
    logprobs, behaviour, advantages = arrays()
    ratios = [r for r, _ in CASES]
    clipped = {"cispo": 4, "grpo": 3}
    for name, build in LOSSES.items():
        loss = build(AlgorithmConfig(clip_low=LOW, clip_high=HIGH))
        sums = loss(logprobs, behaviour, advantages).sums
        assert float(sums["ratio"]) == pytest.approx(sum(ratios))
        assert float(sums["clip_fraction"]) == clipped[name]
        assert float(sums["kl_k1"]) == pytest.approx(-sum(math.log(r) for r in ratios))
        assert float(sums["kl_k3"]) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
        parts = [loss(logprobs[cut], behaviour[cut], advantages[cut]).sums for cut in (slice(0, 5), slice(5, None))]
        for key, value in sums.items():
            assert not value.requires_grad
            assert float(parts[0][key] + parts[1][key]) == pytest.approx(float(value))


def random_policy(seed=0, tokens=40, vocabulary=7):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, vocabulary, dtype=torch.float64, generator=generator)
    picked = torch.randint(vocabulary, (tokens,), generator=generator)
    noise = 0.4 * torch.randn(tokens, dtype=torch.float64, generator=generator)
    advantages = torch.randn(tokens, dtype=torch.float64, generator=generator)
    return logits, picked, noise, advantages


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_gradient_through_a_softmax_against_finite_differences(name):
    logits, picked, noise, advantages = random_policy()
    behaviour = logits.log_softmax(-1)[range(len(picked)), picked] + noise
    config = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH)

    def surrogate(free, held):
        """The loss by its definition, with the stop-gradient as a second argument that is held."""
        logp = torch.log(torch.exp(free) / torch.exp(free).sum(-1, keepdim=True))[range(len(picked)), picked]
        if name == "cispo":
            fixed = torch.log(torch.exp(held) / torch.exp(held).sum(-1, keepdim=True))[range(len(picked)), picked]
            return -(torch.clip(torch.exp(fixed - behaviour), 0, 1 + HIGH) * advantages * logp).sum()
        ratio = torch.exp(logp - behaviour)
        return -torch.where(
            advantages > 0, torch.clip(ratio, max=1 + HIGH) * advantages, torch.clip(ratio, min=1 - LOW) * advantages
        ).sum()

    free = logits.clone().requires_grad_()
    logp = free.log_softmax(-1)[range(len(picked)), picked]
    result = build_loss(config)(logp, behaviour, advantages)
    assert float(result.values.sum().detach()) == pytest.approx(float(surrogate(logits, logits)), abs=1e-10)
    [found] = torch.autograd.grad(result.values.sum(), free)
    step = 1e-6
    for place in [(0, 0), (3, 2), (17, 6), (39, 1), (20, int(picked[20]))]:
        shift = torch.zeros_like(logits)
        shift[place] = step
        numeric = (surrogate(logits + shift, logits) - surrogate(logits - shift, logits)) / (2 * step)
        assert float(found[place]) == pytest.approx(float(numeric), abs=1e-7)
    # And all of it, against the surrogate's own autograd.
    reference = logits.clone().requires_grad_()
    [expected] = torch.autograd.grad(surrogate(reference, logits), reference)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_no_advantage_no_gradient(name):
    logits, picked, noise, _ = random_policy(1)
    logp = logits.log_softmax(-1)[range(len(picked)), picked].requires_grad_()
    values = build_loss(AlgorithmConfig(loss=name))(logp, logp.detach() + noise, torch.zeros(len(picked))).values
    assert gradient(values, logp).count_nonzero() == 0


def test_on_policy_both_are_the_policy_gradient():
    logits, picked, _, advantages = random_policy(2)
    logp = logits.log_softmax(-1)[range(len(picked)), picked].requires_grad_()
    for name in LOSSES:
        values = build_loss(AlgorithmConfig(loss=name))(logp, logp.detach(), advantages).values
        torch.testing.assert_close(gradient(values, logp), -advantages, rtol=0, atol=1e-12)


def test_a_hopeless_ratio_stays_finite():
    logp = torch.tensor([-1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-500.0, -500.0])
    for name in LOSSES:
        result = build_loss(AlgorithmConfig(loss=name))(logp, behaviour, torch.tensor([1.0, -1.0]))
        assert torch.isfinite(result.values).all()
        assert torch.isfinite(gradient(result.values, logp)).all()
        assert all(math.isfinite(float(value)) for value in result.sums.values())


def test_imitation_is_likelihood():
    logits, picked, noise, advantages = random_policy(3)
    free = logits.clone().requires_grad_()
    result = imitation(free.log_softmax(-1)[range(len(picked)), picked], noise, advantages)
    expected = torch.nn.functional.cross_entropy(logits, picked, reduction="none")
    torch.testing.assert_close(result.values.detach(), expected, rtol=0, atol=1e-12)
    assert float(result.sums["nll"]) == pytest.approx(float(expected.sum()))
    [found] = torch.autograd.grad(result.values.sum(), free)
    onehot = torch.nn.functional.one_hot(picked, logits.shape[1])
    torch.testing.assert_close(found, logits.softmax(-1) - onehot, rtol=0, atol=1e-12)
