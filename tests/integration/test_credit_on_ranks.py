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
    load_and_train,
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
    "credit": Case(
        AlgorithmConfig(
            loss="gspo",
            corrections=["sequence_tis"],
            sequence_tis_ratio="mean",
            sequence_tis_low=0.9,
            sequence_tis_high=1.3,
        ),
        TRAINING,
        credit=True,
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


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_make_the_same_of_it(tmp_path, one_rank, ranks, tensor_parallel):
    path, trainers, expected = one_rank
    # The value head needs whole hidden states.
    cases = {name: case for name, case in CASES.items() if tensor_parallel == 1 or not case.algorithm.critic}
    given = {name: (path, STEPS, case) for name, case in cases.items()}
    on_ranks(tmp_path, ranks, tensor_parallel, in_turn, train_and_tell, given)
    assert expected["paid"].metrics[-1].keys() >= {"loss/policy", "loss/kl", "loss/entropy", "reward_kl"}
    for name in cases:
        wanted = expected[name]
        for rank in range(ranks):
            found = msgspec.json.decode((tmp_path / name / f"result-{rank}.json").read_bytes(), type=Result)
            assert found.losses == pytest.approx(wanted.losses, rel=0, abs=TOLERANCE)
            assert found.norms == pytest.approx(wanted.norms, rel=0, abs=TOLERANCE)
            for mine, theirs in zip(found.metrics, wanted.metrics, strict=True):
                assert mine == pytest.approx(theirs, rel=0, abs=TOLERANCE)
            weights = read_tensors(tmp_path / name / f"rank-{rank}.tensors")["weights"]
            for key, tensor in trainers[name].weights().items():
                torch.testing.assert_close(weights[key], tensor, rtol=0, atol=TOLERANCE, msg=key)


RESUMED = {name: CASES[name] for name in ("paid", "critic")}


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory, one_rank):
    """Checkpoints after two steps of two ranks, with a critic and its moments, or with the weight of a bonus."""
    directory = tmp_path_factory.mktemp("two")
    given = {name: (one_rank[0], directory / f"checkpoints-{name}", 2, case) for name, case in RESUMED.items()}
    on_ranks(directory, 2, 1, in_turn, train_and_save, given)
    return {name: latest(directory / f"checkpoints-{name}") for name in RESUMED}


def check_resumed(found: Result, wanted: Result) -> None:
    assert found.losses == pytest.approx(wanted.losses[2:], rel=0, abs=TOLERANCE)
    for mine, theirs in zip(found.metrics, wanted.metrics[2:], strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("name", RESUMED)
def test_what_two_ranks_saved_goes_on_with_one(one_rank, saved_by_two, name):
    path, _, expected = one_rank
    alone = make_trainer(path, None, RESUMED[name])
    alone.load(saved_by_two[name])
    check_resumed(train(alone, 2, STEPS, RESUMED[name]), expected[name])


def test_what_two_ranks_saved_goes_on_with_three(tmp_path, one_rank, saved_by_two):
    path, _, expected = one_rank
    given = {name: (path, saved_by_two[name], 2, STEPS, case) for name, case in RESUMED.items()}
    on_ranks(tmp_path, 3, 1, in_turn, load_and_train, given)
    for name in RESUMED:
        for rank in range(3):
            found = msgspec.json.decode((tmp_path / name / f"result-{rank}.json").read_bytes(), type=Result)
            check_resumed(found, expected[name])


def test_what_one_rank_saved_goes_on_with_two(tmp_path, one_rank):
    path, _, expected = one_rank
    given = {}
    for name, case in RESUMED.items():
        alone = make_trainer(path, None, case)
        train(alone, 0, 2, case)
        given[name] = (path, alone.save(tmp_path / f"checkpoints-{name}", source=path), 2, STEPS, case)
    on_ranks(tmp_path, 2, 1, in_turn, load_and_train, given)
    for name in RESUMED:
        for rank in range(2):
            found = msgspec.json.decode((tmp_path / name / f"result-{rank}.json").read_bytes(), type=Result)
            check_resumed(found, expected[name])
