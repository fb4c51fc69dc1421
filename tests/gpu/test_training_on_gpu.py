"""Training on a GPU: the same losses and gradients as on the CPU, by every way that attention and logits may go."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from random_models import FAMILIES, model_dir, poisoned, random_batch, with_experts

from headrace.algorithms.losses.base import imitation
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.models.attention import AttentionCall
from headrace.models.loading import load_model
from headrace.models.rounding import FourBitLinear, round_weights
from headrace.training import trainer as trainer_module
from headrace.training.attention import Kernels, PackedAttention
from headrace.training.layers import compiled_layers
from headrace.training.logprobs import PLAIN, Reading, compiled_arithmetic, read_head, read_row
from headrace.training.lora import TrainedAdapter
from headrace.training.rows import MicroBatch, plan
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer, accumulate
from headrace.types import Kept

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRAINING = TrainingConfig(learning_rate=1e-3, micro_batch_tokens=48, compile=False)


def gradients(model, batch, **changes):
    model.zero_grad()
    found = accumulate(model, batch, imitation, micro_batch_tokens=10_000, share_prefixes=True, **changes)
    return found.loss, {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


def trainer_of(path, device, **changes):
    training = msgspec.structs.replace(TRAINING, **changes)
    model = prepare_model(load_model(path, device=device), training)
    return Trainer(model, AlgorithmConfig(), training, total_steps=9, warm_start=WarmStartConfig())


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_cpu(tmp_path, family):
    path = model_dir(tmp_path / "model", family)
    batch = random_batch(1)
    expected, wanted = gradients(load_model(path), batch)
    found, grads = gradients(load_model(path, device="cuda"), batch)
    assert found == pytest.approx(expected, abs=1e-4)
    norm = max(float(g.abs().max()) for g in wanted.values())
    for name, gradient in wanted.items():
        assert float((grads[name] - gradient).abs().max()) < 1e-4 * max(norm, 1.0), name


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_is_close_and_reduces_the_loss(tmp_path, compiled):
    path = model_dir(tmp_path / "model", "qwen3")
    torch._dynamo.reset()
    expected = trainer_of(path, "cpu").step(imitation_batch(1))
    trainer = trainer_of(path, "cuda", compile=compiled)
    reports = [trainer.step(imitation_batch(step)) for step in range(1, 9)]
    assert reports[0].loss == pytest.approx(expected.loss, abs=0.05)
    assert reports[0].grad_norm == pytest.approx(expected.grad_norm, rel=0.05)
    assert reports[-1].loss < reports[0].loss - 0.1
    layers = compiled_layers(trainer.model)
    assert (layers is not None and layers.on) == compiled
    assert trainer.model.dtype == torch.bfloat16
    for name, master in trainer.weights().items():
        assert master.dtype == torch.float32
        half = dict(trainer.model.named_parameters())[name]
        assert torch.equal(half, master.to(torch.bfloat16)), name


def imitation_batch(step):
    # The same sequences in every step: a few steps learn them.
    return msgspec.structs.replace(random_batch(1), step=step, objective="imitation")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_and_uncompiled_agree_in_float32(tmp_path, checkpointing):
    path = model_dir(tmp_path / "model", "llama")
    torch._dynamo.reset()
    plain = trainer_of(path, "cuda", compute_dtype="float32")
    fast = trainer_of(path, "cuda", compute_dtype="float32", compile=True, activation_checkpointing=checkpointing)
    for step in range(1, 4):
        one, other = (trainer.step(random_batch(step, step=step)) for trainer in (plain, fast))
        assert one.loss == pytest.approx(other.loss, abs=1e-4)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    layers = compiled_layers(fast.model)
    assert layers is not None and layers.on


@pytest.mark.parametrize("checkpointing", [False, True])
def test_recorded_experts_are_followed_as_on_the_cpu(tmp_path, checkpointing):
    path = model_dir(tmp_path / "model", "mixtral")
    torch._dynamo.reset()
    batch = with_experts(random_batch(1), first_alike=False)
    changes = {"compute_dtype": "float32", "compile": True, "activation_checkpointing": checkpointing}
    expected, found = (trainer_of(path, device, **changes).step(batch) for device in ("cpu", "cuda"))
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    # Few choices are so close that rounding makes them.
    assert found.metrics["rerouted"] == pytest.approx(expected.metrics["rerouted"], abs=0.03)
    free = trainer_of(path, "cuda", **changes).step(random_batch(1))
    assert abs(free.loss - found.loss) > 1e-3


@pytest.mark.parametrize("compiled", [False, True])
def test_four_bits_are_those_of_the_cpu(compiled):
    torch.manual_seed(0)
    host = torch.nn.Linear(333, 1000, bias=False)
    device = torch.nn.Linear(333, 1000, bias=False, device="cuda")
    device.load_state_dict(host.state_dict())
    for layer in (host, device):
        round_weights({"layer": layer})
    assert torch.equal(device.weight.cpu(), host.weight)
    held = FourBitLinear(device)
    assert torch.equal(held.weight, device.weight)
    forward = torch.compile(held.forward, dynamic=True, fullgraph=True) if compiled else held.forward
    hidden = torch.randn(7, 333, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output = forward(hidden)
    (gradient,) = torch.autograd.grad(output.float().square().sum(), hidden)
    dense = device.to(torch.bfloat16)(hidden)
    (expected,) = torch.autograd.grad(dense.float().square().sum(), hidden)
    torch.testing.assert_close(output, dense, rtol=0.01, atol=0.01)
    torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.02)


def test_kernels_with_shared_prefixes_are_exact():
    batch = random_batch(5)
    row = max(plan(batch, micro_batch_tokens=10_000, share_prefixes=True), key=len)
    assert any(segment.prefix is not None for segment in row.segments)
    torch.manual_seed(0)
    shape = [(1, heads, len(row), 64) for heads in (4, 2, 2)]
    exact = [torch.randn(*size, dtype=torch.bfloat16, device="cuda") for size in shape]
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        tensors = [x.to(dtype).requires_grad_() for x in exact]
        q, k, v = tensors
        call = AttentionCall(layer=0, query=q, key=k, value=v, scaling=0.125, window=None, softcap=None, sinks=None)
        context = PackedAttention(row)
        assert Kernels().take(q, v) == (dtype == torch.bfloat16)
        output = context.attend(call)
        torch.manual_seed(1)
        gradient = torch.randn(output.shape, device="cuda").to(torch.bfloat16).to(dtype)
        found = torch.autograd.grad(output, tensors, gradient)
        results.append([output.double(), *(g.double() for g in found)])
        with torch.no_grad():
            saved, lse = context.attend_saving(call)
            again = context.attend_backward(call, saved, lse, gradient)
        for one, other in zip(again[:3], found, strict=True):
            torch.testing.assert_close(one.transpose(1, 2).double(), other.double(), rtol=0.02, atol=0.02)
    for one, other in zip(*results, strict=True):
        assert float((one - other).abs().max()) < 0.03 * max(1.0, float(other.abs().max()))


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    trainer = trainer_of(model_dir(tmp_path / "model"), "cuda")
    trainer.step(random_batch(1, step=1))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    huge = random_batch(2, step=2)
    report = trainer.step(poisoned(huge, np.flatnonzero(huge.trained)[:1]))
    assert report.skipped
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, before[name]), name
    assert not trainer.step(random_batch(3, step=3)).skipped
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def test_a_checkpoint_goes_on_alike(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path, "cuda")
    for step in (1, 2):
        trainer.step(random_batch(step, step=step))
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    again = trainer_of(path, "cuda")
    again.load(saved)
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name
    one, other = (t.step(random_batch(3, step=3)) for t in (trainer, again))
    assert one.loss == pytest.approx(other.loss, abs=1e-3)


def all_kept(batch):
    """For every second token a set of three, itself among them."""
    sets = [sorted({int(token), 3, 4}) if number % 2 else [] for number, token in enumerate(batch.token_ids)]
    return Kept(
        counts=np.array([len(kept) for kept in sets], np.int32),
        token_ids=np.array([token for kept in sets for token in kept], np.int32),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("reading", ["plain", "entropy", "kept", "chunks"])
def test_a_step_does_not_wait_for_the_device(tmp_path, family, reading, monkeypatch):
    halves, optimizers = [], []
    for name, made in (("HalfWeights", halves), ("Optimizer", optimizers)):
        real = getattr(trainer_module, name)
        monkeypatch.setattr(trainer_module, name, lambda *a, real=real, made=made: made.append(real(*a)) or made[-1])
    trainer = trainer_of(model_dir(tmp_path / "model", family), "cuda")
    batch = random_batch(1, groups=6, size=4)
    if reading == "kept":
        batch = msgspec.structs.replace(batch, kept=all_kept(batch))

    def step():
        accumulate(
            trainer.model,
            batch,
            imitation,
            micro_batch_tokens=256,
            share_prefixes=True,
            half=halves[0] if halves else None,
            entropy="none" if reading == "plain" else "gradient",
            chunk_elements=7 * 61 if reading == "chunks" else None,
        )
        return optimizers[-1].begin(1e-3)

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert read().changed


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_fused_head_is_exact_in_float32(compiled, temperature):
    """Values and gradients against autograd over whole logits in float64, in several chunks."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(700, 64, generator=generator, device="cuda", dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5003, 64, generator=generator, device="cuda", dtype=torch.float64, requires_grad=True)
    targets = np.random.default_rng(0).integers(0, 5003, 700)
    gradient = torch.randn(700, generator=generator, device="cuda", dtype=torch.float64)
    whole = (hidden @ weight.t() / temperature).log_softmax(-1)
    expected = whole.gather(1, torch.from_numpy(targets).cuda()[:, None])[:, 0]
    wanted = torch.autograd.grad(expected, [hidden, weight], gradient)
    none = np.zeros(0, np.int64)
    row = MicroBatch(none, none, (), np.arange(700), targets, none, none)
    reading = Reading.of(row, np.arange(700), 96, torch.device("cuda"))
    given = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    found = read_head(*given, reading, temperature, compiled_arithmetic() if compiled else PLAIN)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    for one, other in zip(torch.autograd.grad(found, given, gradient.float()), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_sixteen_bits_are_read_as_float32_whatever_is_read(tmp_path, family):
    """The fused head, entropies and kept sets in one chunk or many: all from the same float32 logits."""
    model = load_model(model_dir(tmp_path / "model", family), dtype="bfloat16", device="cuda")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    row = max(plan(random_batch(5), micro_batch_tokens=10_000, share_prefixes=True), key=len)
    whole = Kept(
        counts=np.full(len(row.targets), 61, np.int32),
        token_ids=np.tile(np.arange(61, dtype=np.int32), len(row.targets)),
    )
    expected = read_row(model, row).logprobs.double()
    for changes in ({"entropy": "value"}, {"kept": whole}, {"entropy": "gradient", "chunk_elements": 5 * 61}):
        found = read_row(model, row, **changes).logprobs
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_is_computed_again_drops_the_same_again(tmp_path, compiled):
    path = model_dir(tmp_path / "model")
    norms = []
    for checkpointing in (False, True):
        torch._dynamo.reset()
        training = msgspec.structs.replace(
            TRAINING, compute_dtype="float32", compile=compiled, activation_checkpointing=checkpointing
        )
        model = prepare_model(load_model(path, device="cuda"), training)
        adapter = TrainedAdapter(model, LoraConfig(rank=4, dropout=0.3), base=path, seed=0)
        trainer = Trainer(
            model, AlgorithmConfig(), training, total_steps=9, warm_start=WarmStartConfig(), adapter=adapter
        )
        norms.append([trainer.step(random_batch(step, step=step)).grad_norm for step in range(1, 5)])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
