"""Payments, targets, weights of sequences, epochs and a critic on two and three ranks: what one rank makes of them."""

from __future__ import annotations

import msgspec
import pytest
import torch
from rank_cases import (
    TRAINING,
    Case,
    Result,
    in_turn,
    make_trainer,
    model_dir,
    on_ranks,
    read_tensors,
    train,
    train_and_save,
    train_and_tell,
)

from headrace.config.schema import AlgorithmConfig
from headrace.training.checkpoints.base import latest

pytestmark = pytest.mark.slow

STEPS = 4
TOLERANCE = 1e-8
CASES = {
    "paid": Case(
        AlgorithmConfig(
            loss="grpo",
            kl="k3",
            kl_weight=0.5,
            reward_kl="k3",
            reward_kl_weight=0.3,
            entropy_target=3.0,
            entropy_rate=0.05,
            corrections=["sequence_tis"],
        ),
        TRAINING,
    ),
    # One of the minibatches has a single group, so that a rank may have nothing of its own to compute.
    "epochs": Case(AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed"), TRAINING, epochs=2),
    "critic": Case(
        AlgorithmConfig(loss="grpo", critic=True, discount=0.9, critic_learning_rate=3e-3, value_weight=0.3),
        TRAINING,
        epochs=2,
    ),
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    path = model_dir(tmp_path_factory.mktemp("model") / "llama")
    trainers = {name: make_trainer(path, None, case) for name, case in CASES.items()}
    return path, trainers, {name: train(trainers[name], 0, STEPS, case) for name, case in CASES.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_make_the_same_of_it(tmp_path, one_rank, ranks):
    path, trainers, expected = one_rank
    on_ranks(tmp_path, ranks, 1, in_turn, train_and_tell, {name: (path, STEPS, case) for name, case in CASES.items()})
    assert expected["paid"].metrics[-1].keys() >= {"loss/policy", "loss/kl", "loss/entropy", "reward_kl"}
    for name, wanted in expected.items():
        for rank in range(ranks):
            found = msgspec.json.decode((tmp_path / name / f"result-{rank}.json").read_bytes(), type=Result)
            assert found.losses == pytest.approx(wanted.losses, rel=0, abs=TOLERANCE)
            assert found.norms == pytest.approx(wanted.norms, rel=0, abs=TOLERANCE)
            for mine, theirs in zip(found.metrics, wanted.metrics, strict=True):
                assert mine == pytest.approx(theirs, rel=0, abs=TOLERANCE)
            weights = read_tensors(tmp_path / name / f"rank-{rank}.tensors")["weights"]
            for key, tensor in trainers[name].weights().items():
                torch.testing.assert_close(weights[key], tensor, rtol=0, atol=TOLERANCE, msg=key)


def test_a_critic_of_two_ranks_goes_on_with_one(tmp_path, one_rank):
    path, _, expected = one_rank
    case = CASES["critic"]
    on_ranks(tmp_path / "two", 2, 1, train_and_save, path, tmp_path / "checkpoints", 2, case)
    alone = make_trainer(path, None, case)
    alone.load(latest(tmp_path / "checkpoints"))
    found, wanted = train(alone, 2, STEPS, case), expected["critic"]
    assert found.losses == pytest.approx(wanted.losses[2:], rel=0, abs=TOLERANCE)
    assert [each["value"] for each in found.metrics] == pytest.approx(
        [each["value"] for each in wanted.metrics[2:]], rel=0, abs=TOLERANCE
    )
