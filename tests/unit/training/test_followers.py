"""Teachers that follow the policy: what they hold after each step, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import model_dir, random_batch

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.config.scorers import TeacherConfig
from headrace.errors import UserError
from headrace.models.loading import load_model
from headrace.training.followers import make_follower
from headrace.training.trainer import Trainer

EMA = TeacherConfig(policy="ema", decay=0.75)
EARLIER = TeacherConfig(policy="earlier", versions_ago=2)


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2,), value), "b": torch.full((1,), -value)}


def test_an_average_by_hand() -> None:
    follower = make_follower(EMA, tensors(8.0), 1)
    follower.follow(1, tensors(0.0))
    assert follower.weights()["a"].tolist() == [6.0, 6.0]
    follower.follow(2, tensors(4.0))
    assert follower.weights()["b"].tolist() == [-5.5]


def test_the_version_of_some_versions_ago() -> None:
    follower, policy = make_follower(EARLIER, tensors(0.0), 2), tensors(0.0)
    seen = []
    for step in range(1, 11):
        for tensor in policy.values():
            tensor.fill_(float(step))
        follower.follow(step, policy)
        seen.append(float(follower.weights()["a"][0]))
    # A version has two steps: after version 3, which is step 6, version 1 of step 2 is two versions ago.
    assert seen == [0, 0, 0, 0, 0, 2, 2, 4, 4, 6]
    again = make_follower(EARLIER, tensors(99.0), 2)
    again.restore({name: tensor.clone() for name, tensor in follower.state().items()})
    for each in (follower, again):
        each.follow(11, tensors(11.0))
        each.follow(12, tensors(12.0))
    assert again.weights()["a"].tolist() == follower.weights()["a"].tolist() == [8.0, 8.0]


def make_trainer(path: Path, **followers: TeacherConfig) -> Trainer:
    return Trainer(
        load_model(path),
        AlgorithmConfig(),
        TrainingConfig(learning_rate=1e-2),
        total_steps=10,
        warm_start=WarmStartConfig(),
        followers=followers,
    )


def held(trainer: Trainer, name: str) -> dict[str, torch.Tensor]:
    with trainer.taught_by(name) as weights:
        return {key: tensor.clone() for key, tensor in weights.items()}


def test_followers_of_a_trainer_and_of_one_that_continues(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model")
    straight = make_trainer(path, ema=EMA, old=EARLIER)
    # Followers begin with what a warm start has made of the policy.
    straight.step(random_batch(9, step=0, objective="imitation"))
    policy = [{name: tensor.clone() for name, tensor in straight.weights().items()}]
    average = {name: tensor.double() for name, tensor in policy[0].items()}
    for step in range(1, 5):
        straight.step(random_batch(step, step=step))
        policy.append({name: tensor.clone() for name, tensor in straight.weights().items()})
        average = {name: 0.75 * average[name] + 0.25 * policy[-1][name].double() for name in average}
        if step == 3:
            straight.save(tmp_path / "checkpoints", source=path)
    before = {name: tensor.clone() for name, tensor in straight.weights().items()}
    for name, tensor in held(straight, "ema").items():
        torch.testing.assert_close(tensor.double(), average[name], rtol=0, atol=1e-6)
        assert float((tensor - policy[-1][name]).abs().max()) > 1e-4
    assert all(torch.equal(tensor, policy[2][name]) for name, tensor in held(straight, "old").items())
    # The policy has its own weights back, to the bit.
    assert all(torch.equal(tensor, before[name]) for name, tensor in straight.weights().items())
    [saved] = (tmp_path / "checkpoints").iterdir()
    resumed = make_trainer(path, ema=EMA, old=EARLIER)
    resumed.load(saved)
    resumed.step(random_batch(4, step=4))
    for follower in ("ema", "old"):
        mine, other = held(resumed, follower), held(straight, follower)
        assert all(torch.equal(tensor, other[name]) for name, tensor in mine.items())
    with pytest.raises(UserError, match=r"\[scorers.new\] policy: .* does not hold this teacher"):
        make_trainer(path, new=EMA).load(saved)
    with pytest.raises(UserError, match=r"\[scorers.ema\] policy: .*teacher-ema.safetensors: it does not hold earlier"):
        make_trainer(path, ema=EARLIER).load(saved)
    with pytest.raises(UserError, match="it does not hold an average of this policy; resume as it was trained"):
        make_trainer(path, old=EMA).load(saved)
