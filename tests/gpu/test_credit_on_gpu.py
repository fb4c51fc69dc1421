"""A critic, payments and several updates on a GPU: what a CPU makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "training"))

from random_models import in_minibatches, model_dir, random_batch, with_rewards

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CRITIC = AlgorithmConfig(loss="grpo", critic=True, discount=0.9, value_weight=0.3, reward_kl="k1", reward_kl_weight=0.1)
PAID = AlgorithmConfig(reward_kl="k3", entropy_target=3.0, entropy_rate=0.05, corrections=["sequence_tis"])


def reports(path, device, algorithm, dtype):
    # A learning rate at which three steps in one dtype stay near those in another.
    training = TrainingConfig(learning_rate=1e-4, micro_batch_tokens=48, compile=False, compute_dtype=dtype)
    model = load_model(path, device=device)
    trainer = Trainer(model, algorithm, training, total_steps=9, warm_start=WarmStartConfig())
    batches = [random_batch(n, groups=4, step=n) for n in (1, 2, 3)]
    if algorithm.critic:
        batches = [with_rewards(batch) for batch in batches]
    return [trainer.step(in_minibatches(batch, epochs=2)) for batch in batches]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("algorithm", [CRITIC, PAID], ids=["critic", "paid"])
def test_steps_equal_those_of_a_cpu(tmp_path, algorithm, dtype, tolerance):
    path = model_dir(tmp_path / "model")
    expected = reports(path, "cpu", algorithm, "float32")
    found = reports(path, "cuda", algorithm, dtype)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine.loss == pytest.approx(wanted.loss, abs=tolerance)
        assert mine.metrics.keys() == wanted.metrics.keys()
        for name in ("value", "value_loss", "reward_kl", "entropy", "loss/policy"):
            assert mine.metrics.get(name, 0.0) == pytest.approx(wanted.metrics.get(name, 0.0), abs=tolerance), name
