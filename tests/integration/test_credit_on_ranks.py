"""Payments, targets, weights of sequences, epochs, critics on several ranks: what one rank makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
    value_head,
)

from headrace.config.schema import AlgorithmConfig, LoraConfig
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
    # The norm that is trained in full beside the adapter makes the hidden states that the head reads.
    "critic on an adapter": Case(
        AlgorithmConfig(
            loss="grpo",
            critic=True,
            discount=0.9,
            critic_learning_rate=3e-3,
            value_weight=0.3,
            reward_kl="k1",
            reward_kl_weight=0.2,
        ),
        TRAINING,
        epochs=2,
        lora=LoraConfig(rank=3, alpha=6.0, modules=["norm"]),
    ),
}
CRITICS = {name: case for name, case in CASES.items() if case.algorithm.critic}
RESUMED = {"paid": CASES["paid"], **CRITICS}
Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OneRank:
    """What one rank made of every case in all steps."""

    model: Path
    results: dict[str, Result]
    weights: dict[str, Tensors]
    heads: dict[str, Tensors]
    """The value heads of the cases with a critic, with their moments."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    path = model_dir(tmp_path_factory.mktemp("model") / "llama")
    trainers = {name: make_trainer(path, None, case) for name, case in CASES.items()}
    results = {name: train(trainers[name], 0, STEPS, case) for name, case in CASES.items()}
    saved = tmp_path_factory.mktemp("saved")
    for name in CRITICS:
        trainers[name].save(saved / name, source=path)
    heads = {name: value_head(saved / name) for name in CRITICS}
    return OneRank(path, results, {name: trainer.weights() for name, trainer in trainers.items()}, heads)


def check_tensors(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=TOLERANCE, msg=key)


def check_result(found: Result, wanted: Result, first: int = 0) -> None:
    """Compare the figures of the steps after the first ones."""
    assert found.losses == pytest.approx(wanted.losses[first:], rel=0, abs=TOLERANCE)
    assert found.norms == pytest.approx(wanted.norms[first:], rel=0, abs=TOLERANCE)
    for mine, theirs in zip(found.metrics, wanted.metrics[first:], strict=True):
        assert mine == pytest.approx(theirs, rel=0, abs=TOLERANCE)


def check_told(path: Path, ranks: int, name: str, one_rank: OneRank, first: int = 0) -> None:
    """Compare what every rank told of a case, and the value head that all of them saved."""
    for rank in range(ranks):
        found = msgspec.json.decode((path / name / f"result-{rank}.json").read_bytes(), type=Result)
        check_result(found, one_rank.results[name], first)
        check_tensors(read_tensors(path / name / f"rank-{rank}.tensors")["weights"], one_rank.weights[name])
    if name in CRITICS:
        check_tensors(value_head(path / name / "saved"), one_rank.heads[name])


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (3, 1), (2, 2)])
def test_ranks_make_the_same_of_it(tmp_path: Path, one_rank: OneRank, ranks: int, tensor_parallel: int) -> None:
    given = {name: (one_rank.model, STEPS, case) for name, case in CASES.items()}
    on_ranks(tmp_path, ranks, tensor_parallel, in_turn, train_and_tell, given)
    assert one_rank.results["paid"].metrics[-1].keys() >= {"loss/policy", "loss/kl", "loss/entropy", "reward_kl"}
    for name in CASES:
        check_told(tmp_path, ranks, name, one_rank)


def test_the_cases_train_what_is_compared(one_rank: OneRank) -> None:
    """The value heads have left zero, and the adapter the base."""
    for name, head in one_rank.heads.items():
        assert head["weight"].abs().max() > 1e-3, name
        assert abs(one_rank.results[name].metrics[-1]["value"]) > 1e-3, name
    adapter = one_rank.weights["critic on an adapter"]
    assert all(tensor.any() for key, tensor in adapter.items() if ".lora_B." in key)


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory, one_rank: OneRank) -> dict[str, Path]:
    """Checkpoints after two steps of two ranks, with a critic and its moments, or with the weight of a bonus."""
    directory = tmp_path_factory.mktemp("two")
    given = {name: (one_rank.model, directory / f"checkpoints-{name}", 2, case) for name, case in RESUMED.items()}
    on_ranks(directory, 2, 1, in_turn, train_and_save, given)
    saved = {name: latest(directory / f"checkpoints-{name}") for name in RESUMED}
    return {name: path for name, path in saved.items() if path is not None}


@pytest.mark.parametrize("name", RESUMED)
def test_what_two_ranks_saved_goes_on_with_one(
    tmp_path: Path, one_rank: OneRank, saved_by_two: dict[str, Path], name: str
) -> None:
    alone = make_trainer(one_rank.model, None, RESUMED[name])
    alone.load(saved_by_two[name])
    check_result(train(alone, 2, STEPS, RESUMED[name]), one_rank.results[name], first=2)
    check_tensors(alone.weights(), one_rank.weights[name])
    if name in CRITICS:
        alone.save(tmp_path, source=one_rank.model)
        check_tensors(value_head(tmp_path), one_rank.heads[name])


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(3, 1), (4, 2)])
def test_what_two_ranks_saved_goes_on_with_others(
    tmp_path: Path, one_rank: OneRank, saved_by_two: dict[str, Path], ranks: int, tensor_parallel: int
) -> None:
    given = {name: (one_rank.model, saved_by_two[name], 2, STEPS, case) for name, case in RESUMED.items()}
    on_ranks(tmp_path, ranks, tensor_parallel, in_turn, load_and_train, given)
    for name in RESUMED:
        check_told(tmp_path, ranks, name, one_rank, first=2)


def test_what_one_rank_saved_goes_on_with_two(tmp_path: Path, one_rank: OneRank) -> None:
    given = {}
    for name, case in RESUMED.items():
        alone = make_trainer(one_rank.model, None, case)
        train(alone, 0, 2, case)
        saved = alone.save(tmp_path / f"checkpoints-{name}", source=one_rank.model)
        given[name] = (one_rank.model, saved, 2, STEPS, case)
    on_ranks(tmp_path, 2, 1, in_turn, load_and_train, given)
    for name in RESUMED:
        check_told(tmp_path, 2, name, one_rank, first=2)
