"""Several updates in one step: a batch in minibatches, trained for several epochs, against a plain loop."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from random_models import AllDouble, in_minibatches, model_dir, poisoned, random_batch, with_experts
from reference_loop import plain_model, reference_losses

from headrace.algorithms.assemble import assemble
from headrace.channel.codec import decode, encode
from headrace.config import make_config
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.observe.spans import SpanRecorder
from headrace.pipeline.batches import make_batch
from headrace.training.lora import TrainedAdapter
from headrace.training.trainer import Trainer
from headrace.types import Batch, Group, Kept, Prompt, Rollout, TeacherScores, Trace

TRAINING = TrainingConfig(learning_rate=2e-3, micro_batch_tokens=32, weight_decay=0.01)
PPO = AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed", kl="k3", kl_weight=0.2)


def trainer_of(path, algorithm=PPO, dtype="float32", **changes):
    warm_start = WarmStartConfig(steps=1)
    return Trainer(load_model(path, dtype=dtype), algorithm, TRAINING, total_steps=9, warm_start=warm_start, **changes)


def work():
    warm = random_batch(9, step=0, objective="imitation")
    return [warm, *(in_minibatches(random_batch(n, groups=4, step=n), epochs=2) for n in (1, 2, 3))]


@pytest.mark.parametrize(
    "algorithm",
    [PPO, AlgorithmConfig(loss="grpo"), AlgorithmConfig(loss="gspo", entropy_weight=0.1, corrections=["sequence_tis"])],
    ids=lambda algorithm: algorithm.loss,
)
def test_the_plain_loop_exactly(tmp_path, algorithm):
    path = model_dir(tmp_path / "model")
    trainer, plain = trainer_of(path, algorithm, "float64"), plain_model(path, dtype=torch.float64)
    with AllDouble():
        reports = [trainer.step(batch) for batch in work()]
        expected = reference_losses(
            plain, work(), algorithm, TRAINING, total_steps=9, warm_start=WarmStartConfig(steps=1)
        )
    assert [report.loss for report in reports] == pytest.approx(expected, abs=1e-9)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trainer.weights()[name], parameter.detach(), rtol=0, atol=1e-8)
    assert (trainer.steps_done, trainer.policy_steps) == (4, 3), "a batch is one step"
    if algorithm is PPO:
        # From its second update on, the policy has left the weights with which the version began.
        assert reports[1].metrics["clip_fraction"] > 0


def test_frozen_policies_score_a_batch_once(tmp_path):
    spans = SpanRecorder()
    trainer = trainer_of(model_dir(tmp_path / "model"), spans=spans)
    batch = in_minibatches(random_batch(1, groups=2), epochs=3)
    report = trainer.step(batch)
    names = [span.name for span in spans.drain()]
    assert names.count("optimize") == 6
    assert report.micro_batches == names.count("train")
    once, thrice = trainer_of(tmp_path / "model"), trainer_of(tmp_path / "model")
    assert thrice.step(batch).tokens == 3 * once.step(msgspec.structs.replace(batch, epochs=1)).tokens


def test_a_part_has_everything_of_its_sequences():
    batch = with_experts(random_batch(4, groups=3))
    n = len(batch.token_ids)
    rng = np.random.default_rng(0)
    counts = np.where(batch.trained, rng.integers(1, 4, n), 0).astype(np.int32)
    kept = Kept(counts=counts, token_ids=rng.integers(3, 60, int(counts.sum())).astype(np.int32))
    temperatures = rng.random(n).astype(np.float32)
    teacher = TeacherScores.of_unscored(n, 2)
    teacher.tails[:] = rng.random(n)
    batch = msgspec.structs.replace(batch, kept=kept, temperatures=temperatures, teacher=teacher)
    batch = in_minibatches(batch)
    batch = decode(Batch, [bytes(frame) for frame in encode(batch)])
    assert batch.epochs == 2
    ends = np.cumsum(batch.lengths)
    for number, part in enumerate(batch.parts()):
        own = [i for i in range(len(batch.lengths)) if batch.minibatches[i] == number]
        places = np.concatenate([np.arange(ends[i] - batch.lengths[i], ends[i]) for i in own])
        for name in (
            "token_ids",
            "trained",
            "logprobs",
            "versions",
            "advantages",
            "weights",
            "temperatures",
            "routing",
        ):
            assert np.array_equal(getattr(part, name), getattr(batch, name)[places]), name
        assert part.lengths.tolist() == batch.lengths[own].tolist()
        assert part.groups.tolist() == batch.groups[own].tolist()
        expected = batch.kept.at(places)
        assert np.array_equal(part.kept.counts, expected.counts)
        assert np.array_equal(part.kept.token_ids, expected.token_ids)
        assert np.array_equal(part.teacher.tails, batch.teacher.tails[places])
        assert (part.minibatches, part.epochs) == (None, 1)
        assert (part.step, part.version) == (batch.step, batch.version)


def test_only_the_update_of_a_poisoned_minibatch_is_skipped(tmp_path):
    path = model_dir(tmp_path / "model")
    batch = in_minibatches(random_batch(1, groups=4), epochs=1)
    second = np.repeat(batch.minibatches == 1, batch.lengths)
    trainer, alone = trainer_of(path), trainer_of(path)
    report = trainer.step(poisoned(batch, second))
    first = alone.step(batch.parts()[0])
    assert not report.skipped
    assert (report.loss, report.grad_norm, report.metrics) == (first.loss, first.grad_norm, first.metrics)
    for name, tensor in alone.weights().items():
        assert torch.equal(trainer.weights()[name], tensor)
    assert trainer.step(poisoned(batch)).skipped


def test_an_adapter_drops_other_inputs_in_every_update(tmp_path):
    path = model_dir(tmp_path / "model")

    def trained(epochs):
        model = load_model(path)
        adapter = TrainedAdapter(model, LoraConfig(rank=4, dropout=0.5), base=path, seed=0)
        still = msgspec.structs.replace(TRAINING, learning_rate=1e-9)
        trainer = Trainer(model, AlgorithmConfig(), still, total_steps=9, warm_start=WarmStartConfig(), adapter=adapter)
        # Weights that hardly move: what is dropped makes the difference.
        return trainer.step(msgspec.structs.replace(random_batch(1), epochs=epochs)).grad_norm

    assert trained(2) == trained(2), "repeatable"
    assert trained(1) != pytest.approx(trained(2), rel=1e-3)


def test_continuing_from_a_checkpoint_equals_never_having_stopped(tmp_path):
    path = model_dir(tmp_path / "model")
    straight, stopped, resumed = (trainer_of(path) for _ in range(3))
    expected = [straight.step(batch) for batch in work()]
    for batch in work()[:2]:
        stopped.step(batch)
    resumed.load(stopped.save(tmp_path / "checkpoints", source=path))
    assert [resumed.step(batch).loss for batch in work()[2:]] == [report.loss for report in expected[2:]]
    for name, tensor in straight.weights().items():
        assert torch.equal(resumed.weights()[name], tensor)


def answers(lengths_of):
    groups = []
    for number, lengths in enumerate(lengths_of):
        rollouts = []
        for index, length in enumerate(lengths):
            trace = Trace.of_context(np.array([1, 2], np.int32)).extended(
                np.full(length, 7, np.int32), np.zeros(length), np.full(length, 3, np.int32), trained=True
            )
            rollouts.append(
                Rollout(id=f"{number}/{index}", index=index, traces=[trace], reward=float(index), ending="finished")
            )
        groups.append(Group(id=number, prompt=Prompt(id=str(number), text="a"), version=3, rollouts=rollouts))
    return groups


@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
def test_weights_are_those_of_steps_of_their_own(normalize):
    groups = answers([(1, 2), (3, 4), (5, 1)])
    options = {"step": 1, "version": 3, "advantage": "dr_grpo", "normalize": normalize, "group_size": 2}
    options |= {"max_tokens": 8, "temperature": 1.0}
    whole = assemble(groups, **options, minibatches=2, epochs=3)
    assert whole.minibatches.tolist() == [0, 0, 1, 1, 0, 0]
    assert whole.epochs == 3
    for part, own in zip(whole.parts(), ([groups[0], groups[2]], [groups[1]]), strict=True):
        alone = assemble(own, **options)
        assert part.weights.tolist() == alone.weights.tolist()
        assert part.advantages.tolist() == alone.advantages.tolist()
        assert part.token_ids.tolist() == alone.token_ids.tolist()


def test_the_configuration_reaches_the_batch_and_few_groups_make_few_minibatches():
    minimal = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "spell_backward"}}
    config = make_config(minimal, ["algorithm.minibatches=4", "algorithm.epochs=2"])
    batch = make_batch(config, answers([(1, 2), (3, 4)]), step=1, version=3)
    assert (len(batch.parts()), batch.epochs) == (2, 2)
    plain = make_batch(make_config(minimal), answers([(1, 2), (3, 4)]), step=1, version=3)
    assert (plain.minibatches, plain.epochs, len(plain.parts())) == (None, 1, 1)
