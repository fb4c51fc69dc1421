"""Several ranks train what one rank trains, to the last digits, and go on from each other's checkpoints."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from rank_cases import (
    CANARY,
    CASES,
    KL,
    MUON,
    PLAIN,
    AllDouble,
    Case,
    Result,
    in_turn,
    load_and_save,
    load_and_train,
    make_trainer,
    model_dir,
    on_ranks,
    read_tensors,
    train,
    train_and_save,
    train_and_tell,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.training.checkpoints.base import damage_of, latest, read_state

pytestmark = pytest.mark.slow

STEPS = 10
FEW = 6
TOLERANCE = 1e-8


def results(path: Path, ranks: int) -> tuple[list[Result], list[dict]]:
    told = [msgspec.json.decode((path / f"result-{r}.json").read_bytes(), type=Result) for r in range(ranks)]
    return told, [read_tensors(path / f"rank-{rank}.tensors") for rank in range(ranks)]


def files_of(checkpoint: Path) -> list[str]:
    return sorted(str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())


def assert_reported(found: Result, expected: Result) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE)
    assert found.norms == pytest.approx(expected.norms, rel=0, abs=TOLERANCE)
    for mine, wanted in zip(found.metrics, expected.metrics, strict=True):
        assert mine == pytest.approx(wanted, rel=0, abs=TOLERANCE)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=name)


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def one_rank(request, tmp_path_factory):
    """A model with a tied head, and one with experts; ten steps on one rank."""
    path = model_dir(tmp_path_factory.mktemp("model") / request.param, request.param)
    trainer = make_trainer(path, None)
    start = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    result = train(trainer, 0, STEPS)
    assert max(float((tensor - start[name]).abs().max()) for name, tensor in trainer.weights().items()) > 1e-3
    return path, trainer, result


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (4, 1), (2, 2)])
def test_ranks_train_what_one_rank_trains(tmp_path, one_rank, ranks, tensor_parallel):
    path, trainer, expected = one_rank
    on_ranks(tmp_path, ranks, tensor_parallel, train_and_tell, path, STEPS)
    told, states = results(tmp_path, ranks)
    for result, state in zip(told, states, strict=True):
        assert_reported(result, expected)
        assert_same(state["weights"], trainer.weights())
    with AllDouble():
        torch.testing.assert_close(states[0]["scores"], torch.from_numpy(trainer.score(CANARY)), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def other_cases(tmp_path_factory):
    """A model with a teacher beside it, and what one rank makes of it in all cases."""
    path = model_dir(tmp_path_factory.mktemp("cases") / "llama")
    model_dir(path.with_name("teacher"), "qwen3", seed=5)
    trainers = {name: make_trainer(path, None, case) for name, case in CASES.items()}
    return path, trainers, {name: train(trainers[name], 0, FEW, case) for name, case in CASES.items()}


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (4, 1), (2, 2)])
def test_other_policies_and_muon_are_those_of_one_rank(tmp_path, other_cases, ranks, tensor_parallel):
    path, trainers, expected = other_cases
    arguments = {name: (path, FEW, case) for name, case in CASES.items()}
    on_ranks(tmp_path, ranks, tensor_parallel, in_turn, train_and_tell, arguments)
    for name, wanted in expected.items():
        told, states = results(tmp_path / name, ranks)
        for result, state in zip(told, states, strict=True):
            assert_reported(result, wanted)
            assert_same(state["weights"], trainers[name].weights())


def test_the_reference_of_a_model_with_experts_that_muon_moves(tmp_path):
    """Experts are cut between the matrices of their stacks, all else through them."""
    path = model_dir(tmp_path / "mixtral", "mixtral")
    case = Case(KL, MUON)
    trainer = make_trainer(path, None, case)
    expected = train(trainer, 0, FEW)
    on_ranks(tmp_path / "ranks", 2, 1, train_and_tell, path, FEW, case)
    told, states = results(tmp_path / "ranks", 2)
    assert expected.metrics[-1]["reference_kl"] > 1e-3
    assert_reported(told[1], expected)
    assert_same(states[1]["weights"], trainer.weights())


def test_a_reference_and_muon_go_on_at_other_numbers_of_ranks(tmp_path):
    """Only the checkpoint has the reference of a warm start: from two ranks to one and four, and from one to two."""
    path = model_dir(tmp_path / "model")
    case = Case(KL, MUON, warm=2)
    straight, stopped, alone = (make_trainer(path, None, case) for _ in range(3))
    expected = train(straight, 0, FEW, case)
    assert expected.metrics[-1]["reference_kl"] > 1e-3
    checkpoints = tmp_path / "checkpoints"
    on_ranks(tmp_path / "two", 2, 1, train_and_save, path, checkpoints, 4, case)
    saved = latest(checkpoints)
    assert (saved / "trainer" / "reference.safetensors").is_file()
    rest = Result(expected.losses[4:], expected.norms[4:], expected.metrics[4:])

    alone.load(saved)
    assert_reported(train(alone, 4, FEW, case), rest)
    assert_same(alone.weights(), straight.weights())

    train(stopped, 0, 4, case)
    whole = stopped.save(tmp_path / "one", source=path)
    for ranks, checkpoint in ((4, saved), (2, whole)):
        on_ranks(tmp_path / f"from {ranks}", ranks, 1, load_and_train, path, checkpoint, 4, FEW, case)
        told, states = results(tmp_path / f"from {ranks}", ranks)
        assert_reported(told[1], rest)
        assert_same(states[1]["weights"], straight.weights())


def test_a_grid_of_both_kinds(tmp_path):
    """Norms of queries and keys, an untied head: two rows of work, two slices each."""
    path = model_dir(tmp_path / "model", "qwen3")
    cases = {"plain": PLAIN, "muon": CASES["muon"]}
    arguments = {name: (path, 2, case) for name, case in cases.items()}
    on_ranks(tmp_path / "ranks", 4, 2, in_turn, train_and_tell, arguments)
    for name, case in cases.items():
        trainer = make_trainer(path, None, case)
        expected = train(trainer, 0, 2)
        told, states = results(tmp_path / "ranks" / name, 4)
        for result, state in zip(told, states, strict=True):
            assert result.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE)
            assert_same(state["weights"], trainer.weights())


def test_a_checkpoint_of_two_ranks_goes_on_at_one_and_four(tmp_path, one_rank):
    path, straight, expected = one_rank
    # Plain shards for one family, slices in shards for the other.
    tensor_parallel = 1 if path.name == "llama" else 2
    checkpoints = tmp_path / "checkpoints"
    on_ranks(tmp_path / "two", 2, tensor_parallel, train_and_save, path, checkpoints, 7)
    saved = latest(checkpoints)
    assert saved is not None
    assert not damage_of(saved)
    assert read_state(saved).version == 7
    assert [found.name for found in checkpoints.iterdir()] == ["step-00000007"]

    alone = make_trainer(path, None)
    alone.load(saved)
    assert train(alone, 7, STEPS).losses == pytest.approx(expected.losses[7:], rel=0, abs=TOLERANCE)
    assert_same(alone.weights(), straight.weights())

    on_ranks(tmp_path / "four", 4, tensor_parallel, load_and_train, path, saved, 7, STEPS)
    told, states = results(tmp_path / "four", 4)
    assert told[3].losses == pytest.approx(expected.losses[7:], rel=0, abs=TOLERANCE)
    assert_same(states[3]["weights"], straight.weights())


def test_checkpoints_of_one_rank_and_of_two_are_each_other(tmp_path):
    """One rank's goes on at two; that one has the same files, experts under their own names."""
    path = model_dir(tmp_path / "model", "mixtral")
    straight, alone = make_trainer(path, None), make_trainer(path, None)
    expected = train(straight, 0, 2)
    train(alone, 0, 1)
    saved = alone.save(tmp_path / "one", source=path)
    on_ranks(tmp_path / "ranks", 2, 1, load_and_save, path, saved, tmp_path / "two", 1, 2)
    told, _ = results(tmp_path / "ranks", 2)
    assert told[1].losses == pytest.approx(expected.losses[1:], rel=0, abs=TOLERANCE)

    again = latest(tmp_path / "two")
    one = straight.save(tmp_path / "straight", source=path)
    assert files_of(again) == files_of(one)
    assert (again / "config.json").read_bytes() == (one / "config.json").read_bytes()
    names = load_file(again / "model.safetensors").keys()
    assert names == load_file(one / "model.safetensors").keys() == load_file(path / "model.safetensors").keys()
    loaded = AutoModelForCausalLM.from_pretrained(again, dtype=torch.float64)
    assert_same({name: p.detach() for name, p in loaded.named_parameters()}, straight.weights())
    assert (again / "chat_template.jinja").read_text() == (path / "chat_template.jinja").read_text()
