from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_models import twins
from torch.distributed.tensor import DTensor

from headrace.config.schema import TrainingConfig
from headrace.errors import UserError
from headrace.training import optimizer as optimizer_module
from headrace.training.optimizer import (
    Muon,
    Optimizer,
    UpdateRatio,
    hidden_matrices,
    learning_rate,
    orthogonalised,
)
from headrace.training.ranks import join, local_tensor, placed_like, shard_model


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
        norm, _, changed, _ = optimizer.begin(0.02)()
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
    optimizer.begin(0.1)()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    set_gradients(model, 1)
    model.vector.grad[1] = poison
    norm, finite, changed, ratio = optimizer.begin(0.1)()
    assert not finite
    assert ratio == 0
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
        whole.begin(0.05)()
        set_gradients(first, seed)
        if seed < 3:
            half.begin(0.05)()
    second.load_state_dict(first.state_dict())
    rest.restore(half.tensors())
    for seed in range(3, 6):
        set_gradients(second, seed)
        rest.begin(0.05)()
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_restoring_changes_no_weight_and_counts_no_step(tmp_path, name, sharded):
    config = TrainingConfig(optimizer=name, weight_decay=0.1)
    ranks = join(tmp_path / "store", 0, 1, tensor_parallel=1, device="cpu", timeout=60) if sharded else None
    try:
        trained, resumed = Tiny(), Tiny()
        with torch.no_grad():
            resumed.matrix[0, 0] = -0.0
        for model in (trained, resumed) if ranks else ():
            shard_model(model, [], ranks, config)
        first, second = (Optimizer(model, config, ranks) for model in (trained, resumed))
        start = {key: local_tensor(p.detach()).clone() for key, p in resumed.named_parameters()}
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for p in (trained.matrix, trained.vector):
                p.grad = placed_like(torch.randn(p.shape, generator=generator), p)
            assert first.begin(0.05)().changed
        saved = {key: tensor.clone() for key, tensor in first.tensors().items()}
        second.restore(saved)
        for key, p in resumed.named_parameters():
            assert isinstance(p, DTensor) == sharded
            assert torch.equal(local_tensor(p.detach()).view(torch.int32), start[key].view(torch.int32)), key
            assert p.grad is None
        found = second.tensors()
        assert found.keys() == saved.keys()
        assert ("momentum_buffer/matrix" in found) == (name == "muon")
        assert all(torch.equal(found[key], tensor) for key, tensor in saved.items())
        assert {float(tensor) for key, tensor in found.items() if key.startswith("step/")} == {3.0}
    finally:
        if ranks:
            ranks.leave()


def test_the_update_ratio_by_hand():
    model = Tiny()
    optimizer = Optimizer(model, TrainingConfig(clip_norm=1e9))
    for seed in range(3):
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        set_gradients(model, seed)
        ratio = optimizer.begin(0.02)().update_ratio
        change = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
        assert ratio == pytest.approx(float(change.norm() / before.norm()), rel=1e-5)


def test_the_update_ratio_of_large_weights_is_close(monkeypatch):
    monkeypatch.setattr(optimizer_module, "SAMPLE", 500)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(100, 113, generator=generator), 5 * torch.randn(40, generator=generator)]
    looked = UpdateRatio(weights)
    before = torch.cat([w.flatten().clone() for w in weights])
    for w in weights:
        w += 0.1 * torch.randn(w.shape, generator=generator)
    change = torch.cat([w.flatten() for w in weights]) - before
    assert looked.after() == pytest.approx(float(change.norm() / before.norm()), rel=0.1)


def test_rates_by_name():
    """The first step of Adam moves every weight by the learning rate: what is left is the factor."""
    model = Tiny()
    config = TrainingConfig(learning_rates={"vec": 0.1, "ct": 3.0, "mat": 2.0}, clip_norm=1e9)
    optimizer = Optimizer(model, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model, 0)
    optimizer.begin(0.01)()
    for name, factor in (("matrix", 2.0), ("vector", 0.1)):
        moved = (dict(model.named_parameters())[name].detach() - before[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.01 * factor), rtol=1e-4, atol=1e-7)
    with pytest.raises(UserError, match=r"\[training\] learning_rates: no trainable parameter has 'head'"):
        Optimizer(model, TrainingConfig(learning_rates={"head": 0.1}))


class Layered(torch.nn.Module):
    """An embedding, two hidden matrices and a norm, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(11, 8)
        self.wide = torch.nn.Linear(8, 20, bias=False)
        self.tall = torch.nn.Linear(20, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self):
        return self.head


def test_muon_orthogonalises_hidden_matrices_and_leaves_the_rest_to_adamw():
    model = Layered()
    optimizer = Optimizer(model, TrainingConfig(optimizer="muon", weight_decay=0.1, clip_norm=1e9))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert optimizer.begin(0.01)().changed
    after = {name: p.detach() for name, p in model.named_parameters()}
    expected = adamw_by_hand(before, [gradients], rate=0.01, decay=0.1, clip=1e9)
    for name in before:
        if name not in ("wide.weight", "tall.weight"):
            torch.testing.assert_close(after[name].double(), expected[name], rtol=0, atol=1e-6)
            continue
        # The first step's direction is that of the gradient, with all singular values brought near 1.
        size = 0.01 * 0.2 * math.sqrt(20)
        direction = (before[name] * (1 - 0.01 * 0.1) - after[name]) / size
        u, _, v = torch.linalg.svd(gradients[name], full_matrices=False)
        aligned = u.T @ direction @ v.T
        assert float((aligned - torch.diag(aligned.diagonal())).abs().max()) < 0.05
        assert 0.6 < float(aligned.diagonal().min()) <= float(aligned.diagonal().max()) < 1.3
    kinds = {key for key in optimizer.tensors() if key.startswith("momentum_buffer/")}
    assert kinds == {"momentum_buffer/wide.weight", "momentum_buffer/tall.weight"}
    with pytest.raises(UserError, match=r"momentum_buffer/wide\.weight, which this model and optimizer have not"):
        Optimizer(model, TrainingConfig()).restore(optimizer.tensors())


def test_biases_of_stacked_experts_are_no_matrices():
    model, _ = twins("gpt_oss")
    biases = [name for name, p in model.named_parameters() if name.endswith("bias") and p.ndim == 2]
    assert {name.rpartition(".")[2] for name in biases} == {"gate_up_proj_bias", "down_proj_bias"}
    assert not hidden_matrices(model) & set(biases)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert Optimizer(model, TrainingConfig(weight_decay=0.1)).begin(0.1)().changed
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (p.ndim < 2 or name in biases), name


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 6, 10)])
def test_muon_against_torch(shape):
    """Torch iterates in bfloat16 on any device: equal but for its rounding. A stack is its matrices one by one."""
    generator = torch.Generator().manual_seed(2)
    start = torch.randn(shape, generator=generator)
    ours = torch.nn.Parameter(start.clone())
    theirs = [torch.nn.Parameter(matrix.clone()) for matrix in start.reshape(-1, *shape[-2:])]
    mine = Muon([ours], lr=0.1, weight_decay=0.3)
    reference = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        for p, gradient in zip(theirs, ours.grad.reshape(-1, *shape[-2:]), strict=True):
            p.grad = gradient.clone()
        mine.step()
        reference.step()
    found = torch.stack([p.detach() for p in theirs]).reshape(shape)
    assert float((ours.detach() - start).abs().max()) > 0.2
    torch.testing.assert_close(ours.detach(), found, rtol=0, atol=0.02)


@pytest.mark.slow  # Its steps are compiled first.
@pytest.mark.filterwarnings("ignore:OptimState8bit")
def test_moments_in_eight_bits_are_near_and_go_on_to_the_bit(monkeypatch):
    monkeypatch.syspath_prepend(Path(sys.prefix) / "torchao")

    def matrix():
        torch.manual_seed(0)
        return torch.nn.Linear(128, 64, bias=False)

    eight = TrainingConfig(optimizer="adamw_8bit", weight_decay=0.01)
    models = [matrix() for _ in range(4)]
    straight, first, second, wide = (
        Optimizer(model, config) for model, config in zip(models, (eight, eight, eight, TrainingConfig()), strict=True)
    )

    def move(model, optimizer, seeds):
        for seed in seeds:
            model.weight.grad = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(seed))
            assert optimizer.begin(0.01)().changed

    for model, optimizer, seeds in zip(models, (straight, first, second, wide), (6, 3, 0, 6), strict=True):
        move(model, optimizer, range(seeds))
    saved = first.tensors()
    assert {str(tensor.dtype) for key, tensor in saved.items() if key.startswith("exp_avg.codes")} == {"torch.uint8"}
    models[2].load_state_dict(models[1].state_dict())
    second.restore(saved)
    move(models[2], second, range(3, 6))
    assert torch.equal(models[2].weight, models[0].weight)
    moved = (models[3].weight - matrix().weight).abs().mean()
    assert float((models[0].weight - models[3].weight).abs().mean()) < 0.1 * float(moved)


def test_muon_iterates_in_float64_where_the_weights_are():
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact, rounded = orthogonalised(matrix), orthogonalised(matrix.float())
    assert exact.dtype == torch.float64
    assert 0 < float((rounded - exact).abs().max()) < 1e-5


def test_eight_bits_without_a_package_are_refused_in_one_line(monkeypatch):
    for package in ("torchao", "torchao.optim", "bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r'^\[training\] optimizer = "adamw_8bit" needs the package torchao'):
        Optimizer(Tiny(), TrainingConfig(optimizer="adamw_8bit"))


class Packed:
    """A state of two tensors, as packages for 8-bit optimizers have them."""

    def __init__(self, like):
        self.device = like.device
        self.codes, self.scale = torch.zeros(like.shape, dtype=torch.uint8), torch.zeros(1)

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


class PackedAdam(torch.optim.Optimizer):
    """Keeps matrices in 8 bits and vectors as they are; its steps do nothing else."""

    def __init__(self, groups, lr, betas):
        super().__init__(groups, {"lr": lr})

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                make = Packed if p.ndim == 2 else torch.zeros_like
                state |= {"step": torch.zeros(()), "exp_avg": make(p), "exp_avg_sq": make(p)}
            state["step"] += 1


@pytest.fixture
def eight_bits(monkeypatch):
    module = ModuleType("torchao.optim")
    module.AdamW8bit = PackedAdam
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", module)
    return TrainingConfig(optimizer="adamw_8bit")


def test_moments_of_another_form_are_refused(eight_bits):
    def after_a_step(config):
        model = Tiny()
        optimizer = Optimizer(model, config)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.begin(0.01)()
        return optimizer.tensors()

    whole, packed = after_a_step(TrainingConfig()), after_a_step(eight_bits)
    assert whole.keys() != packed.keys()
    for saved, config in ((whole, eight_bits), (packed, TrainingConfig())):
        with pytest.raises(UserError, match=r"exp_avg of matrix .* another \[training\] optimizer"):
            Optimizer(Tiny(), config).restore(saved)
        with pytest.raises(UserError, match=r"exp_avg of matrix .* another \[training\] optimizer"):
            Optimizer(Tiny(), config).restore({key: t for key, t in saved.items() if "exp_avg" in key})
    packed["exp_avg.codes/matrix"].fill_(7)
    packed["step/matrix"].fill_(3)
    again = Optimizer(Tiny(), eight_bits)
    again.restore(packed)
    assert all(torch.equal(again.tensors()[key], tensor) for key, tensor in packed.items())


def test_moments_of_another_model_are_refused():
    with pytest.raises(UserError, match="exp_avg/elsewhere"):
        Optimizer(Tiny(), TrainingConfig()).restore({"exp_avg/elsewhere": torch.zeros(1)})
