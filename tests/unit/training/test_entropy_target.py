"""An entropy bonus whose weight follows a target, and the components of a loss in the report of a step."""

from __future__ import annotations

import msgspec
import pytest
import torch
from random_models import AllDouble, in_minibatches, model_dir, poisoned, random_batch
from reference_loop import plain_model, reference_losses

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32)
TARGET = AlgorithmConfig(entropy_target=3.0, entropy_rate=0.05, entropy_weight=0.02)


def trainer_of(path, algorithm=TARGET, dtype="float32", training=TRAINING):
    warm_start = WarmStartConfig()
    return Trainer(load_model(path, dtype=dtype), algorithm, training, total_steps=9, warm_start=warm_start)


@pytest.mark.parametrize("epochs", [0, 2])
def test_the_plain_loop_exactly(tmp_path, epochs):
    """The plain loop computes entropies and weights by itself: several micro-batches, and several updates in a step."""
    path = model_dir(tmp_path / "model")
    trainer, plain = trainer_of(path, dtype="float64"), plain_model(path, dtype=torch.float64)
    batches = [random_batch(number, groups=4, step=number) for number in (1, 2, 3)]
    batches = [in_minibatches(batch, epochs) for batch in batches] if epochs else batches
    with AllDouble():
        reports = [trainer.step(batch) for batch in batches]
        expected = reference_losses(plain, batches, TARGET, TRAINING, total_steps=9)
    assert reports[0].micro_batches > 1
    assert [report.loss for report in reports] == pytest.approx(expected, abs=1e-9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trainer.weights()[name], parameter.detach(), rtol=0, atol=1e-8)
    weight = 0.02
    for report in reports:
        assert report.metrics["entropy_weight"] == pytest.approx(weight, abs=1e-12)
        assert report.metrics["loss/entropy"] == pytest.approx(-weight * report.metrics["entropy"], rel=1e-6)
        weight = min(1.0, max(0.0, weight + 0.05 * (3.0 - report.metrics["entropy"])))


def test_the_weight_has_limits_and_a_skipped_step_leaves_it(tmp_path):
    path = model_dir(tmp_path / "model")
    high = trainer_of(path, AlgorithmConfig(entropy_target=1e6))
    low = trainer_of(path, AlgorithmConfig(entropy_target=1e-6, entropy_rate=1.0, entropy_weight=0.1))
    for trainer, limit in ((high, 1.0), (low, 0.0)):
        trainer.step(random_batch(1))
        assert trainer.step(random_batch(2)).metrics["entropy_weight"] == limit
    assert high.step(poisoned(random_batch(3))).skipped
    assert high.step(random_batch(4)).metrics["entropy_weight"] == 1.0


def test_a_resumed_trainer_goes_on_with_its_weight(tmp_path):
    path = model_dir(tmp_path / "model")
    straight, resumed = trainer_of(path), trainer_of(path)
    straight.step(random_batch(1))
    resumed.load(straight.save(tmp_path / "checkpoints", source=path))
    found, expected = (trainer.step(random_batch(2)) for trainer in (resumed, straight))
    assert expected.metrics["entropy_weight"] != 0.02
    assert (found.loss, found.metrics) == (expected.loss, expected.metrics)


def test_the_entropy_approaches_its_target(tmp_path):
    """With no advantage, only the bonus moves the policy: up to the target, where its weight stops to grow."""
    path = model_dir(tmp_path / "model")
    algorithm = AlgorithmConfig(entropy_target=3.9, entropy_rate=0.5)
    trainer = trainer_of(path, algorithm, training=msgspec.structs.replace(TRAINING, learning_rate=5e-4))
    batch = random_batch(5, groups=2)
    batch.advantages[:] = 0.0
    found = [trainer.step(batch).metrics["entropy"] for _ in range(60)]
    assert found[0] < 3.5
    assert found[-1] == pytest.approx(3.9, abs=0.15)


def test_components_of_a_step_add_up_over_micro_batches(tmp_path):
    path = model_dir(tmp_path / "model")
    algorithm = AlgorithmConfig(kl="k3", kl_weight=0.5, entropy_weight=0.1, reward_kl="k1", reward_kl_weight=0.2)
    trainer = trainer_of(path, algorithm)
    trainer.step(random_batch(1))
    report = trainer.step(random_batch(2))
    parts = {name: value for name, value in report.metrics.items() if name.startswith("loss/")}
    assert parts.keys() == {"loss/policy", "loss/kl", "loss/entropy"}
    assert report.micro_batches > 1
    assert sum(parts.values()) == pytest.approx(report.loss, abs=1e-6)
    # Each is a mean over the trained tokens of the whole step.
    assert parts["loss/kl"] == pytest.approx(0.5 * report.metrics["reference_kl"], abs=1e-6)
    assert parts["loss/entropy"] == pytest.approx(-0.1 * report.metrics["entropy"], abs=1e-6)
    assert abs(report.metrics["reward_kl"]) > 1e-3
