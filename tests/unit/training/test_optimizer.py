from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.schema import TrainingConfig
from headrace.errors import UserError
from headrace.training.optimizer import Optimizer, learning_rate


def rates(schedule, warmup_steps, total_steps):
    return [
        learning_rate(step, peak=1.0, warmup_steps=warmup_steps, schedule=schedule, total_steps=total_steps)
        for step in range(1, total_steps + 2)
    ]


def test_schedules_by_hand():
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert rates("linear", 2, 6) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])
    half = math.sqrt(0.5)
    cosine = [1, (1 + half) / 2, 0.5, (1 - half) / 2, 0]
    assert rates("cosine", 0, 4) == pytest.approx(cosine)


@given(st.sampled_from(["constant", "cosine", "linear"]), st.integers(0, 30), st.integers(1, 60))
def test_schedules_rise_then_never_rise_again(schedule, warmup_steps, total_steps):
    found = rates(schedule, warmup_steps, total_steps)
    assert all(0 <= rate <= 1 for rate in found)
    assert all(rate > 0 for rate in found[:total_steps])
    rising, rest = found[:warmup_steps], found[warmup_steps:]
    assert rising == sorted(rising)
    assert rest == sorted(rest, reverse=True)


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(3, 2, generator=generator))
        self.vector = torch.nn.Parameter(torch.randn(3, generator=generator))
        self.unused = torch.nn.Parameter(torch.randn(2, 2, generator=generator))


def set_gradients(model, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    model.matrix.grad = scale * torch.randn(3, 2, generator=generator)
    model.vector.grad = scale * torch.randn(3, generator=generator)


def adamw_by_hand(weights, gradients, *, rate, decay, beta1=0.9, beta2=0.99, clip=0.5):
    """Decoupled weight decay, bias-corrected moments, clipping over all gradients together; in float64."""
    weights = {name: value.double() for name, value in weights.items()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    for t, step in enumerate(gradients, 1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in step.values()))
        for name, gradient in step.items():
            g = gradient.double() * min(1.0, clip / norm)
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            weights[name] = weights[name] * (1 - rate * decay * (weights[name].ndim > 1))
            hat = second[name] / (1 - beta2**t)
            weights[name] = weights[name] - rate * first[name] / (1 - beta1**t) / (hat.sqrt() + 1e-8)
    return weights


def test_adamw_and_clipping_by_hand():
    model = Tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, TrainingConfig(weight_decay=0.1, clip_norm=0.5))
    gradients = []
    for seed in range(4):
        set_gradients(model, seed, scale=1.0 if seed != 2 else 0.01)
        gradients.append({"matrix": model.matrix.grad.clone(), "vector": model.vector.grad.clone()})
        norm, changed = optimizer.apply(0.02)
        assert changed
        total = math.sqrt(sum(float(g.square().sum()) for g in gradients[-1].values()))
        assert norm == pytest.approx(total, rel=1e-6)
        assert model.matrix.grad is None
    expected = adamw_by_hand(before, gradients, rate=0.02, decay=0.1)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(poison):
    model = Tiny()
    optimizer = Optimizer(model, TrainingConfig())
    set_gradients(model, 0)
    optimizer.apply(0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    set_gradients(model, 1)
    model.vector.grad[1] = poison
    norm, changed = optimizer.apply(0.1)
    assert not changed
    assert not math.isfinite(norm)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(tensor, moments[name]) for name, tensor in optimizer.tensors().items())
    assert model.vector.grad is None


def test_restored_moments_continue_bit_for_bit():
    straight, first, second = Tiny(), Tiny(), Tiny()
    config = TrainingConfig(weight_decay=0.01)
    whole, half, rest = Optimizer(straight, config), Optimizer(first, config), Optimizer(second, config)
    for seed in range(6):
        set_gradients(straight, seed)
        whole.apply(0.05)
        set_gradients(first, seed)
        if seed < 3:
            half.apply(0.05)
    second.load_state_dict(first.state_dict())
    rest.restore(half.tensors())
    for seed in range(3, 6):
        set_gradients(second, seed)
        rest.apply(0.05)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


def test_moments_of_another_model_are_refused():
    with pytest.raises(UserError, match="exp_avg/elsewhere"):
        Optimizer(Tiny(), TrainingConfig()).restore({"exp_avg/elsewhere": torch.zeros(1)})
