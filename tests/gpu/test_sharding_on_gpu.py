"""One rank on a GPU, wrapped and with its weights on the host, trains what an unwrapped model trains there."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))

from random_models import model_dir, random_batch

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.ranks import join
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRAINING = TrainingConfig(
    learning_rate=1e-3, micro_batch_tokens=48, activation_checkpointing=True, compute_dtype="float32", compile=False
)


PLAIN = AlgorithmConfig()
KL = AlgorithmConfig(kl="k3", kl_weight=0.1)


def losses(model, ranks, training, algorithm=PLAIN):
    trainer = Trainer(model, algorithm, training, total_steps=5, warm_start=WarmStartConfig(), ranks=ranks)
    return [trainer.step(random_batch(step, step=step)).loss for step in range(1, 6)], trainer


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 1e-4), ({"offload": True}, 1e-4), ({"compute_dtype": "bfloat16"}, 0.05)],
    ids=["wrapped", "offloaded", "bfloat16"],
)
def test_one_rank_equals_the_unwrapped_model(tmp_path, changes, tolerance):
    path = model_dir(tmp_path / "model", "qwen3")
    expected, plain = losses(load_model(path, device="cuda"), None, TRAINING)
    training = msgspec.structs.replace(TRAINING, **changes)
    ranks = join(tmp_path / "store", 0, 1, tensor_parallel=1, device="cuda", timeout=60)
    try:
        found, trainer = losses(prepare_model(load_model(path), training, ranks), ranks, training)
        weights = {name: tensor.to_local() for name, tensor in trainer.weights().items()}
        assert found == pytest.approx(expected, abs=tolerance)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert {tensor.device.type for tensor in weights.values()} == {"cpu" if training.offload else "cuda"}
        if training.compute_dtype == "float32":
            for name, tensor in plain.weights().items():
                assert float((weights[name].cuda() - tensor).abs().mean()) < 1e-5, name
    finally:
        ranks.leave()


def test_a_reference_takes_the_place_of_offloaded_weights_that_muon_moves(tmp_path):
    """Shards on the host, copied to the GPU as it comes to them, and matrices that are gathered there."""
    path = model_dir(tmp_path / "model", "qwen3")
    training = msgspec.structs.replace(TRAINING, optimizer="muon")
    expected, plain = losses(load_model(path, device="cuda"), None, training, KL)
    training = msgspec.structs.replace(training, offload=True)
    ranks = join(tmp_path / "store", 0, 1, tensor_parallel=1, device="cuda", timeout=60)
    try:
        found, trainer = losses(prepare_model(load_model(path), training, ranks), ranks, training, KL)
        assert found == pytest.approx(expected, abs=5e-3)
        for name, tensor in plain.weights().items():
            assert float((trainer.weights()[name].to_local().cuda() - tensor).abs().mean()) < 1e-4, name
    finally:
        ranks.leave()
