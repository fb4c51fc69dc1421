"""From groups of scored rollouts to updated weights, against advantages by definition and a plain loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from random_models import AllDouble, model_dir
from reference_loop import plain_model, reference_losses

from headrace.algorithms.assemble import assemble
from headrace.algorithms.credit import Credit
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training.trainer import Trainer
from headrace.types import NO_VERSION, Rollout
from plain_credit import plain_advantages, random_group

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32, weight_decay=0.01)
OPTIONS = {"version": 3, "normalize": "token", "group_size": 4, "max_tokens": 32, "temperature": 0.9}
CASES = {
    "turn, state": (Credit("turn", 0.9, "state", 1.0), "grpo", AlgorithmConfig(loss="grpo")),
    "step, position": (
        Credit("step", 0.7, "position"),
        "dr_grpo",
        AlgorithmConfig(corrections=["sequence_tis"], sequence_tis_low=0.5, reward_kl="k1", reward_kl_weight=0.1),
    ),
    "token, prefix": (Credit("token", 1.0, "prefix", 0.5), "rloo", AlgorithmConfig(loss="dapo", kl="k2")),
    "step, group": (
        Credit("step", 1.0, "group"),
        "grpo",
        AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed"),
    ),
}


def may_train(rollout: Rollout) -> bool:
    return rollout.ending != "truncated"


def by_definition(batch, groups, credit, name, minibatches):
    """The batch with advantages and weights that were computed one token at a time."""
    plain = plain_advantages(groups, credit.of, credit.discount, credit.baseline, credit.outcome_weight, name)
    places = [
        (n % minibatches, (g.id, r.index, t, i), bool(one.trained[i]) and may_train(r))
        for n, g in enumerate(groups)
        for r in g.rollouts
        for t, one in enumerate(r.traces)
        for i in range(len(one))
    ]
    counts = [sum(trained for part, _, trained in places if part == number) for number in range(minibatches)]
    return msgspec.structs.replace(
        batch,
        advantages=np.array([plain[key] if trained else 0.0 for _, key, trained in places], np.float32),
        weights=np.array([1 / counts[part] if trained else 0.0 for part, _, trained in places], np.float32),
        trained=np.array([trained for _, _, trained in places]),
    )


@pytest.mark.parametrize(("name", "minibatches", "epochs"), zip(CASES, (2, 1, 1, 2), (2, 1, 1, 2), strict=True))
def test_steps_with_credit_exactly(tmp_path, name, minibatches, epochs):
    """Several traces, turns, salvaged beginnings, masked answers and one without a token, in several micro-batches."""
    credit, advantage, algorithm = CASES[name]
    path = model_dir(tmp_path / "model")
    rng = np.random.default_rng(5)
    batches, expected, made = [], [], []
    for step in (1, 2):
        groups = [random_group(rng, 10 * step + n) for n in range(3)]
        batch = assemble(
            groups, step=step, advantage=advantage, credit=credit, mask_overlong=True,
            minibatches=minibatches, epochs=epochs, **OPTIONS,
        )  # fmt: skip
        batches.append(batch)
        expected.append(by_definition(batch, groups, credit, advantage, minibatches))
        made += [r for g in groups for r in g.rollouts]
        assert len(np.unique(batch.advantages[batch.trained])) > 10
    assert {r.ending for r in made} == {"finished", "truncated"}
    traces = [one for r in made for one in r.traces if one.trained.any()]
    assert any((one.versions[~one.trained] != NO_VERSION).any() for one in traces)
    model = load_model(path, dtype="float64")
    trainer = Trainer(model, algorithm, TRAINING, total_steps=9, warm_start=WarmStartConfig())
    plain = plain_model(path, dtype=torch.float64)
    with AllDouble():
        reports = [trainer.step(batch) for batch in batches]
        losses = reference_losses(plain, expected, algorithm, TRAINING, total_steps=9)
    assert reports[0].micro_batches > minibatches * epochs
    # The advantages are in float32, and were computed in another order.
    assert [report.loss for report in reports] == pytest.approx(losses, abs=1e-6)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(trainer.weights()[key], parameter.detach(), rtol=0, atol=1e-6)


def test_a_minibatch_of_masked_answers_updates_nothing(tmp_path):
    """Its group still has a baseline, but no token to train."""
    rng = np.random.default_rng(1)
    groups = [random_group(rng, n) for n in (1, 2)]
    for one in groups[1].rollouts:
        one.ending = "truncated"
    path = model_dir(tmp_path / "model")
    trainers = []
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(critic=True, loss="grpo")):
        batches = [
            assemble(
                chosen, step=1, advantage="grpo", mask_overlong=True, critic=algorithm.critic, minibatches=parts,
                **OPTIONS,
            )
            for chosen, parts in ((groups, 2), (groups[:1], 1), (groups[1:], 1))
        ]  # fmt: skip
        trainers = [
            Trainer(load_model(path), algorithm, TRAINING, total_steps=9, warm_start=WarmStartConfig()) for _ in batches
        ]
        both, first, second = (trainer.step(batch) for trainer, batch in zip(trainers, batches, strict=True))
        assert (both.loss, both.grad_norm, both.metrics) == (first.loss, first.grad_norm, first.metrics)
        assert second.skipped and not both.skipped
        for name, tensor in trainers[1].weights().items():
            assert torch.equal(trainers[0].weights()[name], tensor)
