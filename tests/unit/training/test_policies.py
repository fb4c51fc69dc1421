"""The policies beside the one in training: what they score, that they stay what they were, what a step makes of it."""

from __future__ import annotations

import msgspec
import numpy as np
import peft
import pytest
import torch
from random_models import AllDouble, model_dir, random_batch, twins
from reference_loop import plain_model, reference_losses, sequence_logprobs

from headrace.config.declared import Needs
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.errors import UserError
from headrace.models.loading import load_model, named_weights
from headrace.training import logprobs
from headrace.training.checkpoints.saving import REFERENCE_FILE
from headrace.training.logprobs import read_row
from headrace.training.lora import TrainedAdapter
from headrace.training.policies import FrozenPolicy, Policies, StoredWeights
from headrace.training.rows import plan
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32)
WARM_START = WarmStartConfig(steps=2, learning_rate=5e-3)
ALGORITHMS = {
    "reference": AlgorithmConfig(kl="k3", kl_weight=0.5),
    "k1": AlgorithmConfig(loss="grpo", kl="k1", kl_weight=0.5),
    "paid k1": AlgorithmConfig(loss="grpo", reward_kl="k1", reward_kl_weight=0.3),
    "paid k3": AlgorithmConfig(reward_kl="k3", reward_kl_weight=0.3, kl="k2", corrections=["sequence_tis"]),
    "whole sequences": AlgorithmConfig(
        loss="grpo",
        corrections=["sequence_tis"],
        sequence_tis_ratio="mean",
        sequence_tis_low=0.9,
        sequence_tis_high=1.3,
    ),
    "recomputed": AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed"),
    "distillation": AlgorithmConfig(loss="distillation", teacher="given"),
    "all": AlgorithmConfig(
        loss="decoupled_ppo", proximal="recomputed", kl="k2", kl_weight=0.1, entropy_weight=0.05, corrections=["tis"]
    ),
}


def work(warm=2, policy=4):
    """Supervised steps, then policy steps: two of them make a version."""
    imitation = [random_batch(100 + i, step=1 + i, objective="imitation") for i in range(warm)]
    batches = [random_batch(200 + i, groups=2, step=1 + warm + i) for i in range(policy)]
    return imitation + [msgspec.structs.replace(batch, version=10 + i // 2) for i, batch in enumerate(batches)]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_reference_loop_exactly(tmp_path, name):
    path, teaching = model_dir(tmp_path / "model"), model_dir(tmp_path / "teacher", "qwen3", seed=5)
    algorithm = ALGORITHMS[name]
    taught = algorithm.teacher is not None
    trainer = Trainer(
        load_model(path, dtype="float64"),
        algorithm,
        TRAINING,
        total_steps=4,
        warm_start=WARM_START,
        teacher=load_model(teaching, dtype="float64") if taught else None,
    )
    plain = plain_model(path, dtype=torch.float64)
    plain_teacher = plain_model(teaching, dtype=torch.float64) if taught else None
    with AllDouble():
        losses = [trainer.step(batch).loss for batch in work()]
        expected = reference_losses(
            plain,
            work(),
            algorithm,
            TRAINING,
            total_steps=4,
            warm_start=WARM_START,
            teacher=plain_teacher,
        )
    assert losses == pytest.approx(expected, abs=1e-9)
    for key, parameter in plain.named_parameters():
        torch.testing.assert_close(trainer.weights()[key], parameter.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize("warm", [0, 2])
def test_the_reference_is_the_same_after_a_restart(tmp_path, warm):
    """With a warm start the checkpoint brings it, without one it is in the model directory."""
    path = model_dir(tmp_path / "model")
    batches = work(warm)

    def fresh():
        return Trainer(load_model(path), ALGORITHMS["reference"], TRAINING, total_steps=4, warm_start=WARM_START)

    straight, stopped, resumed = fresh(), fresh(), fresh()
    expected = [straight.step(batch) for batch in batches]
    assert expected[-1].metrics["reference_kl"] > 1e-4
    for batch in batches[: warm + 2]:
        stopped.step(batch)
    saved = stopped.save(tmp_path / "checkpoints", source=path)
    assert (saved / REFERENCE_FILE).is_file() == bool(warm)
    resumed.load(saved)
    assert [resumed.step(batch).loss for batch in batches[warm + 2 :]] == [r.loss for r in expected[warm + 2 :]]
    for name, tensor in straight.weights().items():
        assert torch.equal(resumed.weights()[name], tensor)


def test_friction_55_the_proximal_policy_survives_a_restart_inside_a_version(tmp_path):
    """The first step of a version is trained again under its old id; the second one trains the id published since."""
    path = model_dir(tmp_path / "model")
    first, second = (msgspec.structs.replace(batch, version=10) for batch in work(0, 2))
    republished = msgspec.structs.replace(second, version=11, republished=[11])

    def clipped(*batches):
        trainer = Trainer(load_model(path), ALGORITHMS["recomputed"], TRAINING, total_steps=2, warm_start=WARM_START)
        return [trainer.step(batch).metrics["clip_fraction"] for batch in batches]

    undisturbed = clipped(first, second)
    assert undisturbed[0] == 0.0 < undisturbed[1]
    assert clipped(first, republished) == undisturbed
    # Without a restart, version 11 begins with the weights of its own first step.
    assert clipped(first, msgspec.structs.replace(second, version=11)) == [0.0, 0.0]


def test_a_reference_that_is_nowhere_is_refused(tmp_path):
    """A warm start made it, and a checkpoint without KL does not keep it; all other checkpoints go on with one."""
    path = model_dir(tmp_path / "model")

    def fresh(algorithm=ALGORITHMS["reference"], lora=False):
        model = load_model(path)
        adapter = TrainedAdapter(model, LoraConfig(rank=2), base=path) if lora else None
        return Trainer(model, algorithm, TRAINING, total_steps=4, warm_start=WARM_START, adapter=adapter)

    def saved(name, batches, lora=False):
        trainer = fresh(AlgorithmConfig(), lora)
        for batch in batches:
            trainer.step(batch)
        return trainer.save(tmp_path / name, source=path)

    warm = work(2, 1)
    with pytest.raises(
        UserError, match=r"^\[algorithm\] kl: .*step-00000003 does not hold the policy that its warm start"
    ):
        fresh().load(saved("both", warm))
    fresh().load(saved("no warm start", work(0, 1)))
    fresh().load(saved("no policy step", warm[:2]))
    fresh(lora=True).load(saved("an adapter", warm, lora=True))
    fresh(AlgorithmConfig()).load(saved("no KL", warm))


def test_exchanged_weights_come_back_to_the_bit_whatever_happens():
    model, other = twins("llama")[0], twins("llama", seed=1)[0]
    mine = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    theirs = named_weights(other)
    stored = StoredWeights(model)
    for name, tensor in stored.tensors().items():
        tensor.copy_(theirs[name])
    with pytest.raises(RuntimeError, match="meanwhile"), stored.installed():
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in named_weights(model).items())
        raise RuntimeError("meanwhile")
    assert all(torch.equal(tensor, mine[name]) for name, tensor in named_weights(model).items())
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in stored.tensors().items())


def test_a_frozen_policy_scores_what_a_plain_forward_gives():
    packed, plain = twins("qwen3")
    batch = random_batch(3, temperature=0.8)
    rows = plan(batch, micro_batch_tokens=40, share_prefixes=True)
    assert len(rows) > 1
    found = np.zeros(len(batch.token_ids))
    for row, scored in zip(rows, FrozenPolicy(packed).logprobs(rows, batch), strict=True):
        assert not scored.requires_grad
        found[row.sources] = scored.numpy()
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        tokens = torch.tensor(batch.token_ids[start:end].astype("int64"))
        with torch.no_grad():
            expected = sequence_logprobs(plain, tokens, 0.8).numpy()
        trained = batch.trained[start + 1 : end]
        np.testing.assert_allclose(found[start + 1 : end][trained], expected[trained], atol=5e-6)


def test_an_adapter_switched_off_is_the_reference():
    base, _ = twins("llama")
    batch = random_batch(4)
    rows = plan(batch, micro_batch_tokens=1000, share_prefixes=True)
    with torch.no_grad():
        expected = read_row(base, rows[0]).logprobs
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    policies = Policies(adapted.eval(), Needs(reference=True), switched_off=adapted.disable_adapter)
    [found] = policies.of(batch)["reference"].logprobs(rows, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert policies.reference is None
    with torch.no_grad():
        assert float((read_row(adapted, rows[0]).logprobs - expected).abs().max()) > 1e-3


def test_a_teacher_that_is_missing_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"\[algorithm\] teacher"):
        Trainer(twins("llama")[0], ALGORITHMS["distillation"], TRAINING, total_steps=1, warm_start=WARM_START)


@pytest.mark.parametrize("elements", [None, 5 * 61])
def test_friction_54_every_token_is_scored_at_its_own_temperature(elements, monkeypatch):
    """Answers to one prompt share the position before them, also if they were sampled at several temperatures."""
    if elements is not None:
        monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", elements)
    packed, plain = twins("qwen3")
    batch = random_batch(3)
    levels = np.array([0.5, 1.0, 1.4], np.float32)
    batch.temperatures = levels[np.random.default_rng(0).integers(0, 3, len(batch.token_ids))]
    rows = plan(batch, micro_batch_tokens=10_000, share_prefixes=True)
    found = np.zeros(len(batch.token_ids))
    for row, scored in zip(rows, FrozenPolicy(packed).logprobs(rows, batch), strict=True):
        found[row.sources] = scored.numpy()
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        tokens = torch.tensor(batch.token_ids[start:end].astype("int64"))
        with torch.no_grad():
            at = {level: sequence_logprobs(plain, tokens, float(level)).numpy() for level in levels}
        for place in np.flatnonzero(batch.trained[start:end]):
            expected = at[batch.temperatures[start + place]][place - 1]
            assert found[start + place] == pytest.approx(expected, abs=1e-5)
