"""Moments in 8 bits on several ranks: where blocks are cut as on one rank, they are one rank's to the bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import on_ranks, random_batch, read_tensors, tell_tensors, whole_weights
from rank_pairs import TORCHAO, write_model

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.checkpoints.base import latest
from headrace.training.optimizer import Optimizer
from headrace.training.ranks import Ranks, own_part, placed_like, shard_model, whole_tensor
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:OptimState8bit")]

EIGHT = TrainingConfig(optimizer="adamw_8bit", learning_rate=1e-3, weight_decay=0.01, clip_norm=1e9)
STEPS = 4


class Matrices(torch.nn.Module):
    """One matrix that is in 8 bits on up to four ranks, one on up to two, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = torch.nn.Linear(256, 128, bias=False)
        self.small = torch.nn.Linear(128, 64, bias=False)
        self.odd = torch.nn.Linear(50, 30, bias=False)


def with_torchao() -> None:
    if str(TORCHAO) not in sys.path:
        sys.path.append(str(TORCHAO))
    torch.compiler.set_stance("force_eager")  # torchao would compile its step for each shape


def step(model: torch.nn.Module, optimizer: Optimizer, seeds: range) -> None:
    """Make steps with the same gradients on any number of ranks."""
    for seed in seeds:
        for p in model.parameters():
            whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            p.grad = placed_like(own_part(whole, p), p)
        assert optimizer.begin(1e-2)().changed


def step_and_tell(ranks: Ranks, path: Path) -> None:
    with_torchao()
    model = Matrices()
    shard_model(model, list(model.children()), ranks, EIGHT)
    optimizer = Optimizer(model, EIGHT, ranks)
    step(model, optimizer, range(STEPS))
    parameters = dict(model.named_parameters())
    moments = {
        key: whole_tensor(placed_like(tensor, parameters[key.partition("/")[2]]))
        for key, tensor in optimizer.tensors().items()
    }
    weights = {name: whole_tensor(p.detach()) for name, p in parameters.items()}
    tell_tensors(ranks, path, {"weights": weights | {key.replace("/", "|"): tensor for key, tensor in moments.items()}})


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_of_a_shard_is_a_block_of_the_whole(tmp_path: Path, ranks: int, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(TORCHAO)
    alone = Matrices()
    with torch.compiler.set_stance("force_eager"):
        optimizer = Optimizer(alone, EIGHT)
        step(alone, optimizer, range(STEPS))
        on_ranks(tmp_path, ranks, 1, step_and_tell)
        found = read_tensors(tmp_path / "rank-0.tensors")["weights"]
        exact = {"large.weight", "small.weight", "odd.weight"} - ({"small.weight"} if ranks == 4 else set())
        start = dict(Matrices().named_parameters())
        for name, p in alone.named_parameters():
            moved = float((p.detach() - start[name]).abs().mean())
            assert torch.equal(found[name], p.detach()) == (name in exact), name
            assert float((found[name] - p.detach()).abs().mean()) < 0.05 * moved, name
        mine = optimizer.tensors()
        assert torch.equal(found["exp_avg.codes|large.weight"], mine["exp_avg.codes/large.weight"])
        assert found["exp_avg.scales|large.weight"].shape == (128, 256)

        # One rank takes what several have saved: the same bits, and the next step too.
        again = Matrices()
        again.load_state_dict({name: found[name] for name, _ in again.named_parameters()})
        resumed = Optimizer(again, EIGHT)
        resumed.restore({key.replace("|", "/"): tensor for key, tensor in found.items() if "|" in key})
        for key, tensor in resumed.tensors().items():
            if key.partition("/")[2] in exact:
                assert torch.equal(tensor, mine[key]), key
        for model, stepping in ((alone, optimizer), (again, resumed)):
            step(model, stepping, range(STEPS, STEPS + 2))
    for name, p in alone.named_parameters():
        moved = float((p.detach() - start[name]).abs().mean())
        assert torch.equal(again.get_parameter(name), p) == (name in exact), name
        assert float((again.get_parameter(name) - p).detach().abs().mean()) < 0.05 * moved, name


def make(path: Path, ranks: Ranks | None) -> Trainer:
    model = prepare_model(load_model(path), EIGHT, ranks)
    return Trainer(model, AlgorithmConfig(), EIGHT, total_steps=20, warm_start=WarmStartConfig(), ranks=ranks)


def train_and_save(ranks: Ranks, path: Path, model: Path, checkpoints: Path) -> None:
    with_torchao()
    trainer = make(model, ranks)
    for number in range(1, 5):
        trainer.step(random_batch(number, step=number))
        if number == 2:
            trainer.save(checkpoints, source=model)
    tell_tensors(ranks, path, {"weights": whole_weights(trainer)})
    trainer.close()
    ranks.meet()


def go_on(ranks: Ranks, path: Path, model: Path, checkpoint: Path) -> None:
    with_torchao()
    trainer = make(model, ranks)
    trainer.load(checkpoint)
    for number in (3, 4):
        trainer.step(random_batch(number, step=number))
    tell_tensors(ranks, path, {"weights": whole_weights(trainer)})
    trainer.close()
    ranks.meet()


def test_a_checkpoint_goes_on_at_other_numbers_of_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    """At the same number to the bit, at another within the rounding of 8 bits."""
    monkeypatch.syspath_prepend(TORCHAO)
    model = write_model(tmp_path / "model")
    start = {name: p.detach().clone() for name, p in load_model(model).named_parameters()}
    on_ranks(tmp_path / "two", 2, 1, train_and_save, model, tmp_path / "checkpoints")
    straight = read_tensors(tmp_path / "two" / "rank-0.tensors")["weights"]
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None

    def near(found: dict[str, torch.Tensor]) -> None:
        moved = sum(float((straight[name] - start[name]).abs().sum()) for name in start)
        assert 0 < sum(float((found[name] - straight[name]).abs().sum()) for name in start) < 0.05 * moved

    for name, ranks, tensor_parallel in (("same", 2, 1), ("four", 4, 1), ("tensor", 2, 2)):
        on_ranks(tmp_path / name, ranks, tensor_parallel, go_on, model, saved)
        found = read_tensors(tmp_path / name / "rank-0.tensors")["weights"]
        if name == "same":
            assert all(torch.equal(found[key], tensor) for key, tensor in straight.items())
        else:
            near(found)
    with torch.compiler.set_stance("force_eager"):
        alone = make(model, None)
        alone.load(saved)
        again = alone.save(tmp_path / "alone", source=model)
        for number in (3, 4):
            alone.step(random_batch(number, step=number))
        near(alone.weights())
        on_ranks(tmp_path / "back", 2, 1, go_on, model, again)
        near(read_tensors(tmp_path / "back" / "rank-0.tensors")["weights"])
