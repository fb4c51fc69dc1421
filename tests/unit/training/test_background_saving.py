"""A checkpoint of one rank is what the trainer was when it was asked for, whatever is trained while it is written."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from random_models import model_dir, random_batch
from safetensors.torch import load_file

from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training import trainer as trainer_module
from headrace.training.checkpoints import saving
from headrace.training.checkpoints.base import copy_companions, latest
from headrace.training.checkpoints.saving import OPTIMIZER_FILE, REFERENCE_FILE
from headrace.training.lora import TrainedAdapter
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32)
WARM_START = WarmStartConfig(steps=1, learning_rate=5e-3)
LORA = LoraConfig(rank=4, alpha=6.0)
KINDS = ["all weights", "experts", "16 bits", "adapter", "adapter of 16 bits"]
PATIENCE = 60


def trainer_of(path, kind="all weights"):
    model = load_model(path)
    return Trainer(
        model,
        AlgorithmConfig(kl="k3", kl_weight=0.5),
        msgspec.structs.replace(TRAINING, compute_dtype="bfloat16" if "16 bits" in kind else None),
        total_steps=5,
        warm_start=WARM_START,
        adapter=TrainedAdapter(model, LORA, base=path) if "adapter" in kind else None,
    )


def model_for(kind, path):
    return model_dir(path, "mixtral" if kind == "experts" else "llama")


def work(trainer):
    """A supervised step and a policy step: the reference is then nowhere else."""
    trainer.step(random_batch(1, step=1, objective="imitation"))
    trainer.step(random_batch(2, step=2))


@pytest.fixture
def held(monkeypatch):
    """Writers wait, with the weights written and the rest not, until this is set."""
    going, reached = threading.Event(), threading.Event()

    def copy_later(source, target):
        reached.set()
        assert going.wait(PATIENCE)
        copy_companions(source, target)

    monkeypatch.setattr(saving, "copy_companions", copy_later)
    going.reached = reached
    yield going
    going.set()


def files_of(checkpoint):
    return {str(f.relative_to(checkpoint)): f.read_bytes() for f in sorted(checkpoint.rglob("*")) if f.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_of_the_moment_of_the_call(tmp_path, held, kind):
    path = model_for(kind, tmp_path / "model")
    still, trainer = trainer_of(path, kind), trainer_of(path, kind)
    for one in (still, trainer):
        work(one)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    future = trainer.begin_save(tmp_path / "on", version=7, source=path)
    assert held.reached.wait(PATIENCE)
    trainer.step(random_batch(3, step=3))
    assert not future.done() and latest(tmp_path / "on") is None, "training went on while it was written"
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())
    held.set()
    saved = future.result(PATIENCE)
    assert saved == latest(tmp_path / "on")
    assert files_of(saved) == files_of(still.save(tmp_path / "still", version=7, source=path))

    again = trainer_of(path, kind)
    again.load(saved)
    assert all(torch.equal(again.weights()[name], tensor) for name, tensor in before.items())
    assert again.step(random_batch(3, step=3)).loss == still.step(random_batch(3, step=3)).loss


def made_by(monkeypatch, name):
    """The parts of this class that trainers make from now on."""
    made, real = [], getattr(trainer_module, name)

    def make(*arguments, **options):
        made.append(real(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(trainer_module, name, make)
    return made


@pytest.mark.parametrize("kind", ["all weights", "experts"])
def test_the_files_are_those_of_save_pretrained(tmp_path, kind, monkeypatch):
    path = model_for(kind, tmp_path / "model")
    optimizers, policies = made_by(monkeypatch, "Optimizer"), made_by(monkeypatch, "Policies")
    trainer = trainer_of(path, kind)
    work(trainer)
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    trainer.model.save_pretrained(tmp_path / "plain")
    for name in ("model.safetensors", "config.json"):
        assert (saved / name).read_bytes() == (tmp_path / "plain" / name).read_bytes(), name
    moments = load_file(saved / OPTIMIZER_FILE)
    assert all(torch.equal(moments[name], tensor) for name, tensor in optimizers[-1].tensors().items())
    reference = load_file(saved / REFERENCE_FILE)
    assert all(torch.equal(reference[name], tensor) for name, tensor in policies[-1].reference.items())


def test_masters_are_written_with_their_own_dtype(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path, "16 bits")
    work(trainer)
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    plain = load_model(path)
    plain.save_pretrained(tmp_path / "plain")
    assert (saved / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()


def test_one_is_written_at_a_time(tmp_path, held):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path)
    work(trainer)
    first = trainer.begin_save(tmp_path / "checkpoints", source=path)
    trainer.step(random_batch(3, step=3))
    threading.Timer(0.2, held.set).start()
    second = trainer.begin_save(tmp_path / "checkpoints", source=path)
    assert first.done()
    trainer.close()
    assert second.done()
    assert [first.result().name, second.result().name] == ["step-00000002", "step-00000003"]


def test_what_a_write_fails_of_is_raised_by_whoever_comes_next(tmp_path, monkeypatch):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path)
    whole = trainer.save(tmp_path / "checkpoints", source=path)
    work(trainer)

    def no_room(source, target):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(saving, "copy_companions", no_room)
        future = trainer.begin_save(tmp_path / "checkpoints", source=path)
        with pytest.raises(OSError, match="No space left"):
            future.result(PATIENCE)
        with pytest.raises(OSError, match="No space left"):
            trainer.begin_save(tmp_path / "checkpoints", source=path)
        trainer.begin_save(tmp_path / "checkpoints", source=path)
        with pytest.raises(OSError, match="No space left"):
            trainer.close()
    trainer.close()
    assert latest(tmp_path / "checkpoints") == whole
