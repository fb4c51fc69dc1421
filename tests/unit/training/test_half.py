"""16-bit passes over float32 masters: small steps are not lost, sums are float32, checkpoints hold the masters."""

from __future__ import annotations

import msgspec
import torch
from random_models import model_dir, random_batch
from safetensors.torch import load_file

from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.lora import TrainedAdapter
from headrace.training.optimizer import HalfWeights
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=1e-5, micro_batch_tokens=48, compute_dtype="bfloat16", device="cpu")


def trainer_of(path, *, lora=False, **changes):
    model = load_model(path)
    adapter = TrainedAdapter(model, LoraConfig(rank=2), base=path) if lora else None
    training = msgspec.structs.replace(TRAINING, **changes)
    return Trainer(model, AlgorithmConfig(), training, total_steps=9, warm_start=WarmStartConfig(), adapter=adapter)


def test_gradients_are_added_up_in_float32():
    layer = torch.nn.Linear(3, 2, bias=False)
    before = layer.weight.detach().clone()
    half = HalfWeights(layer)
    parts = [torch.full((2, 3), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    for part in parts:
        layer.weight.grad = part.clone()
        half.collect()
        assert layer.weight.grad is None
    # In bfloat16, 256 + 1 is 256.
    assert torch.equal(half.masters["weight"].grad, torch.full((2, 3), 258.0))
    assert torch.equal(half.masters["weight"], before)
    with torch.no_grad():
        half.masters["weight"].add_(1.0)
    half.refresh()
    assert torch.equal(layer.weight, (before + 1.0).to(torch.bfloat16))
    with half.whole():
        assert torch.equal(layer.weight, before + 1.0)
    assert layer.weight.dtype == torch.bfloat16


def test_steps_too_small_for_16_bits_are_kept(tmp_path):
    trainer = trainer_of(model_dir(tmp_path / "model"))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    for step in range(1, 4):
        trainer.step(random_batch(step, step=step))
    for name, tensor in trainer.weights().items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, before[name]), name
        assert float((tensor - before[name]).abs().max()) < 4e-5, name


def test_a_checkpoint_holds_the_masters_and_goes_on_to_the_bit(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path)
    trainer.step(random_batch(1, step=1))
    saved = trainer.save(tmp_path / "checkpoints")
    assert {t.dtype for t in load_file(saved / "model.safetensors").values()} == {torch.float32}
    again = trainer_of(path)
    again.load(saved)
    one, other = (t.step(random_batch(2, step=2)) for t in (trainer, again))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_an_adapter_has_masters_too(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path, lora=True)
    for step in (1, 2):
        trainer.step(random_batch(step, step=step))
    weights = trainer.weights()
    assert {t.dtype for t in weights.values()} == {torch.float32}
    live = dict(trainer.model.named_parameters())
    moved = [name for name in weights if "lora_B" in name and float(weights[name].abs().max()) > 0]
    assert moved
    assert {p.dtype for p in live.values()} == {torch.bfloat16}
    saved = trainer.save(tmp_path / "checkpoints")
    again = trainer_of(path, lora=True)
    again.load(saved)
    for name, tensor in weights.items():
        assert torch.equal(tensor, again.weights()[name]), name
    one, other = (t.step(random_batch(3, step=3)) for t in (trainer, again))
    assert one.loss == other.loss
