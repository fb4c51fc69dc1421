"""The critic: GAE by hand, whole steps against a plain trainer, checkpoints."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from plain_critic import PlainCritic
from random_models import AllDouble, in_minibatches, model_dir, random_batch, with_rewards
from reference_loop import plain_model
from safetensors.torch import load_file

from headrace.algorithms.assemble import assemble
from headrace.algorithms.credit import token_rewards
from headrace.algorithms.losses.base import sums_to_go
from headrace.algorithms.losses.critic import gae
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.models.lora import adapter_weights
from headrace.training.checkpoints.saving import CRITIC_FILE
from headrace.training.lora import TrainedAdapter
from headrace.training.trainer import Trainer
from headrace.types import Group, Prompt, Rollout, Score, Trace

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32, weight_decay=0.01, clip_norm=0.5)
CRITIC = AlgorithmConfig(critic=True, discount=0.9, gae_lambda=0.8, critic_learning_rate=3e-3, loss="grpo")
CASES = {
    "head": CRITIC,
    "trunk": msgspec.structs.replace(CRITIC, value_weight=0.3, normalize="sequence"),
    "paid": msgspec.structs.replace(CRITIC, loss="cispo", reward_kl="k1", reward_kl_weight=0.2),
    "monte carlo": AlgorithmConfig(critic=True, gae_lambda=1.0, loss="gspo"),
}


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_gae_by_hand():
    # Two sequences: rewards 0, 1 and 2; values 0.5, 0.25 and 1.
    found = gae(double(0, 1, 2), double(0.5, 0.25, 1), torch.tensor([0, 0, 1]), discount=0.5, decay=0.5)
    last = 1 - 0.25
    first = 0 + 0.5 * 0.25 - 0.5 + 0.25 * last
    torch.testing.assert_close(found.advantages, double(first, last, 1.0))
    torch.testing.assert_close(found.targets, double(first + 0.5, 1.0, 2.0))
    # With discount and decay 1, the target is the sum of what is still to come.
    found = gae(double(1, 2, 4), double(3, -1, 5), torch.tensor([0, 0, 0]), discount=1.0, decay=1.0)
    torch.testing.assert_close(found.targets, double(7, 6, 4))


@pytest.mark.parametrize("discount", [1.0, 0.7, 0.0])
def test_sums_to_go_are_those_of_a_loop(discount):
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 17, 64):
        sequences = np.sort(rng.integers(0, 1 + count // 4, count))
        sequences = np.unique(sequences, return_inverse=True)[1]
        values = rng.normal(size=count)
        expected = [
            sum(discount ** (j - i) * values[j] for j in range(i, count) if sequences[j] == sequences[i])
            for i in range(count)
        ]
        found = sums_to_go(torch.tensor(values), torch.tensor(sequences), discount)
        np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def trainer_of(path, algorithm=CRITIC, dtype="float32", training=TRAINING, **options):
    model = options.pop("model", None) or load_model(path, dtype=dtype)
    return Trainer(model, algorithm, training, total_steps=9, warm_start=WarmStartConfig(), **options)


def work(epochs=0):
    batches = [with_rewards(random_batch(n, groups=4, step=n, temperature=0.8)) for n in (1, 2, 3)]
    return [in_minibatches(batch, epochs) for batch in batches] if epochs else batches


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_plain_trainer_exactly(tmp_path, name, epochs):
    """Rows of several sequences with shared prompts, several micro-batches, several updates."""
    algorithm = CASES[name]
    path = model_dir(tmp_path / "model")
    model = plain_model(path, dtype=torch.float64)
    plain = PlainCritic(model, algorithm, TRAINING, reference=copy.deepcopy(model))
    trainer = trainer_of(path, algorithm, "float64")
    with AllDouble():
        reports = [trainer.step(batch) for batch in work(epochs)]
        expected = [plain.step(batch) for batch in work(epochs)]
    assert [report.loss for report in reports] == pytest.approx(expected, abs=1e-9)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(trainer.weights()[key], parameter.detach(), rtol=0, atol=1e-8)
    head = load_file(trainer.save(tmp_path / "saved", source=path) / CRITIC_FILE)
    torch.testing.assert_close(head["weight"][0], plain.vector.detach(), rtol=0, atol=1e-8)
    torch.testing.assert_close(head["bias"][0], plain.number.detach(), rtol=0, atol=1e-8)
    assert float(head["weight"].abs().max()) > 1e-3
    metrics = reports[-1].metrics
    assert metrics["loss/policy"] + metrics["loss/value"] == pytest.approx(reports[-1].loss, abs=1e-9)
    assert metrics["loss/value"] == pytest.approx(algorithm.value_weight * metrics["value_loss"], abs=1e-9)


def test_the_critic_learns_what_answers_earn(tmp_path):
    """The reward is a constant: the error falls, and with it the advantages."""
    trainer = trainer_of(model_dir(tmp_path / "model"), msgspec.structs.replace(CRITIC, discount=1.0))
    batch = with_rewards(random_batch(1), constant=1.0)
    reports = [trainer.step(batch) for _ in range(80)]
    assert reports[-1].metrics["value_loss"] < 0.05 * reports[0].metrics["value_loss"]
    assert reports[-1].metrics["value"] == pytest.approx(1.0, abs=0.2)


def test_a_resumed_critic_goes_on_to_the_bit_and_a_missing_one_begins_anew(tmp_path):
    path = model_dir(tmp_path / "model")
    straight, resumed = trainer_of(path), trainer_of(path)
    straight.step(work()[0])
    resumed.load(straight.save(tmp_path / "checkpoints", source=path))
    found, expected = ([trainer.step(batch) for batch in work()[1:]] for trainer in (resumed, straight))
    assert [report.metrics for report in found] == [report.metrics for report in expected]
    for name, tensor in straight.weights().items():
        assert torch.equal(resumed.weights()[name], tensor)
    without = trainer_of(path, AlgorithmConfig())
    without.step(random_batch(1))
    saved = without.save(tmp_path / "without", source=path)
    assert not (saved / CRITIC_FILE).exists()
    late = trainer_of(path)
    late.load(saved)
    assert late.step(work()[1]).metrics["value"] == 0.0


def test_a_skipped_update_leaves_the_critic(tmp_path):
    path = model_dir(tmp_path / "model")
    trainer = trainer_of(path)
    trainer.step(work()[0])
    before = load_file(trainer.save(tmp_path / "before", source=path) / CRITIC_FILE)
    huge = work()[1]
    huge.rewards[np.flatnonzero(huge.trained)[0]] = 1e30
    assert trainer.step(huge).skipped
    after = load_file(trainer.save(tmp_path / "after", source=path) / CRITIC_FILE)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not trainer.step(work()[2]).skipped


def test_an_adapter_has_a_critic_too(tmp_path):
    """Adapter and value head are those of plain peft, and the base is the reference that rewards pay for."""
    path = model_dir(tmp_path / "model")
    algorithm = msgspec.structs.replace(CRITIC, value_weight=0.5, reward_kl="k1", reward_kl_weight=0.2)
    model, peft = load_model(path, dtype="float64"), plain_model(path, dtype=torch.float64)
    base = copy.deepcopy(peft)
    adapter = TrainedAdapter(model, LoraConfig(rank=4, alpha=6.0, targets=["q_proj"]), base=path, seed=0)
    model.double()
    peft = get_peft_model(peft, PeftConfig(r=4, lora_alpha=6.0, target_modules=["q_proj"])).eval()
    theirs = adapter_weights(peft)
    for key, tensor in adapter.weights().items():
        theirs[key].copy_(tensor)
    trainer = trainer_of(path, algorithm, model=model, adapter=adapter)
    plain = PlainCritic(peft, algorithm, TRAINING, reference=base)
    with AllDouble():
        reports = [trainer.step(batch) for batch in work(2)]
        expected = [plain.step(batch) for batch in work(2)]
    assert [report.loss for report in reports] == pytest.approx(expected, abs=1e-9)
    assert any(".lora_B." in key and tensor.any() for key, tensor in trainer.weights().items())
    for key, tensor in trainer.weights().items():
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=1e-8)
    saved = trainer.save(tmp_path / "checkpoints", source=path)
    head = load_file(saved / CRITIC_FILE)
    torch.testing.assert_close(head["weight"][0], plain.vector.detach(), rtol=0, atol=1e-8)
    assert not any("head" in name and "lm_head" not in name for name in trainer.weights()), "it is not published"


def test_rewards_of_tokens_by_hand():
    def trace(length):
        return Trace.of_context(np.array([1], np.int32)).extended(
            np.full(length, 7, np.int32), np.zeros(length), np.full(length, 3, np.int32), trained=True
        )

    scores = [
        Score(value=0.5, level="step", start=1, end=3, scorer="steps"),
        Score(value=0.25, level="token", trace=1, start=0, end=1),
        Score(value=9.0),
    ]
    rollout = Rollout(id="0/0", index=0, traces=[trace(3), trace(2)], reward=1.0, ending="finished", scores=scores)
    group = Group(id=0, prompt=Prompt(id="0", text="a"), version=3, rollouts=[rollout])
    batch = assemble(
        [group], step=1, version=3, advantage="grpo", normalize="token", group_size=1, max_tokens=4, temperature=1.0,
        critic=True, length_penalty=0.4,
    )  # fmt: skip
    # The reward loses 0.4 x 5 / 4. Every trace is an episode, and earns it at its end.
    assert batch.rewards.tolist() == [0, 0, 0.5, 0.5, 0, 0.25, 0.5]
    assert not batch.advantages.any()


def test_a_salvaged_beginning_keeps_what_it_earned():
    salvaged = Trace.of_context(np.array([1], np.int32)).extended(
        np.full(5, 7, np.int32), np.zeros(5), np.full(5, 3, np.int32), trained=True
    )
    salvaged.trained[1:3] = False
    scores = [Score(value=0.5, level="step", start=1, end=3), Score(value=0.25, level="step", start=3, end=5)]
    rollout = Rollout(id="0/0", index=0, traces=[salvaged], reward=1.0, ending="finished", scores=scores)
    earned = token_rewards(rollout, 1.0, {})[0]
    assert earned[salvaged.trained].tolist() == [0, 0.25, 1.0], "the score of the beginning is not theirs"
