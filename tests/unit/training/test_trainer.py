from __future__ import annotations

import math
import sys

import msgspec
import numpy as np
import pytest
import torch
from random_models import AllDouble, model_dir, poisoned, random_batch
from reference_loop import plain_model, reference_losses, sequence_logprobs
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from headrace.channel.codec import decode, encode
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.errors import HeadraceError, UserError
from headrace.models.loading import load_model
from headrace.observe.spans import SpanRecorder
from headrace.training.base import StepReport
from headrace.training.checkpoints.base import latest, read_state
from headrace.training.trainer import Trainer
from headrace.types import Batch

TRAINING = TrainingConfig(
    learning_rate=2e-3, warmup_steps=2, schedule="cosine", weight_decay=0.01, micro_batch_tokens=32, clip_norm=0.5
)
WARM_START = WarmStartConfig(steps=2, learning_rate=5e-3)
CISPO = AlgorithmConfig()


def trainer_of(path, *, algorithm=CISPO, training=TRAINING, total_steps=5, spans=None):
    return Trainer(load_model(path), algorithm, training, total_steps=total_steps, warm_start=WARM_START, spans=spans)


def batches(warm=2, policy=5):
    imitation = [random_batch(100 + i, step=1 + i, objective="imitation") for i in range(warm)]
    return imitation + [random_batch(200 + i, step=1 + warm + i, temperature=0.9) for i in range(policy)]


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize(
    ("family", "loss"),
    [("llama", "cispo"), ("llama", "grpo"), ("qwen3", "gspo"), ("gemma2", "grpo"), ("mixtral", "cispo")],
)
def test_the_reference_loop_exactly(tmp_path, family, loss):
    path = model_dir(tmp_path / "model", family)
    algorithm = AlgorithmConfig(loss=loss)
    model, plain = load_model(path, dtype="float64"), plain_model(path, dtype=torch.float64)
    if family == "mixtral":
        model.set_experts_implementation("eager")
        plain.set_experts_implementation("eager")
    trainer = Trainer(model, algorithm, TRAINING, total_steps=5, warm_start=WARM_START)
    work = batches(warm=2, policy=3)
    with AllDouble():
        losses = [trainer.step(batch).loss for batch in work]
        expected = reference_losses(plain, work, algorithm, TRAINING, total_steps=5, warm_start=WARM_START)
    assert losses == pytest.approx(expected, abs=1e-10)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(trainer.weights()[name], parameter.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("family", "loss"), [("llama", "cispo"), ("llama", "grpo"), ("gemma2", "cispo")])
def test_five_steps_equal_the_reference_loop(tmp_path, family, loss):
    path = model_dir(tmp_path / "model", family)
    algorithm = AlgorithmConfig(loss=loss)
    # In float32 each step multiplies the last one's rounding; small steps keep five of them comparable.
    training = msgspec.structs.replace(TRAINING, learning_rate=3e-4)
    warm_start = msgspec.structs.replace(WARM_START, learning_rate=5e-4)
    trainer = Trainer(load_model(path), algorithm, training, total_steps=5, warm_start=warm_start)
    plain = plain_model(path)
    start = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    reports = [trainer.step(batch) for batch in batches()]
    expected = reference_losses(plain, batches(), algorithm, training, total_steps=5, warm_start=warm_start)
    assert [report.loss for report in reports] == pytest.approx(expected, abs=1e-5)
    moved = max(float((tensor - start[name]).abs().max()) for name, tensor in trainer.weights().items())
    assert moved > 1e-3
    for name, parameter in plain.named_parameters():
        # Adam divides by the root of tiny second moments: where a gradient is rounding, so is its direction.
        difference = (parameter.detach() - trainer.weights()[name]).abs()
        assert float(difference.mean()) < 1e-6
        assert float(difference.max()) < 1e-3


def test_reports_say_what_was_done(tmp_path):
    spans = SpanRecorder()
    trainer = trainer_of(model_dir(tmp_path / "model"), spans=spans)
    work = batches()
    reports = [trainer.step(batch) for batch in work]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5, 6, 7]
    cosine = [2e-3 * 0.5 * (1 + math.cos(math.pi * done / 3)) for done in range(3)]
    assert [report.learning_rate for report in reports] == pytest.approx([5e-3, 5e-3, 1e-3, 2e-3, *cosine])
    for batch, report in zip(work, reports, strict=True):
        assert len(batch.token_ids) > report.tokens > int(batch.trained.sum())
        assert report.micro_batches > 1
        assert report.seconds > 0
        assert not report.skipped
    assert reports[0].metrics["nll"] == pytest.approx(reports[0].loss, rel=1e-5)
    assert reports[2].metrics.keys() == {"ratio", "clip_fraction", "kl_k1", "kl_k3", "update_ratio"}
    assert trainer.steps_done == 7
    assert trainer.policy_steps == 5
    assert {span.name for span in spans.drain()} == {"train", "optimize"}
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(reports[0]), type=StepReport)
    assert again == reports[0]


def test_batches_as_they_come_off_the_wire_are_read_only(tmp_path):
    path = model_dir(tmp_path / "model")
    batch = random_batch(3)
    received = decode(Batch, [bytes(frame) for frame in encode(batch)])
    assert not received.token_ids.flags.writeable
    assert trainer_of(path).step(received).loss == trainer_of(path).step(batch).loss


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_two_trainers_agree_to_the_bit(tmp_path, family):
    path = model_dir(tmp_path / "model", family)
    first, second = trainer_of(path), trainer_of(path)
    for batch in batches():
        assert first.step(batch).loss == second.step(batch).loss
    assert_same_weights(first.weights(), second.weights())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_optimizer_continues_to_the_bit(tmp_path, optimizer):
    path = model_dir(tmp_path / "model")
    training = msgspec.structs.replace(TRAINING, optimizer=optimizer, learning_rates={"embed": 0.5, "q_proj": 2.0})
    work = batches(warm=0)
    straight, stopped, resumed = (trainer_of(path, training=training) for _ in range(3))
    expected = [straight.step(batch).loss for batch in work]
    for batch in work[:2]:
        stopped.step(batch)
    resumed.load(stopped.save(tmp_path / "checkpoints", source=path))
    assert [resumed.step(batch).loss for batch in work[2:]] == expected[2:]
    assert_same_weights(resumed.weights(), straight.weights())


def test_a_checkpoint_of_another_optimizer_is_refused_with_both_names(tmp_path):
    path = model_dir(tmp_path / "model")
    adamw, muon = (
        trainer_of(path, training=msgspec.structs.replace(TRAINING, optimizer=name)) for name in ("adamw", "muon")
    )
    muon.load(adamw.save(tmp_path / "fresh", source=path))
    adamw.step(random_batch(1))
    saved = adamw.save(tmp_path / "checkpoints", source=path)
    with pytest.raises(
        UserError, match=r'^\[training\] optimizer = "muon": .*step-00000001 holds the state of "adamw"'
    ):
        muon.load(saved)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_continuing_from_a_checkpoint_equals_never_having_stopped(tmp_path, family, stop_after):
    """Stopped in the warm start, between it and the first policy step, and in the middle of those."""
    path = model_dir(tmp_path / "model", family)
    work = batches()
    straight, stopped = trainer_of(path), trainer_of(path)
    expected = [straight.step(batch).loss for batch in work]
    for batch in work[:stop_after]:
        stopped.step(batch)
    saved = stopped.save(tmp_path / "checkpoints", version=3, source=path)
    assert latest(tmp_path / "checkpoints") == saved
    assert read_state(saved).version == 3
    resumed = trainer_of(path)
    resumed.load(saved)
    assert resumed.steps_done == stop_after
    assert [resumed.step(batch).loss for batch in work[stop_after:]] == expected[stop_after:]
    assert_same_weights(resumed.weights(), straight.weights())


def test_policy_training_starts_with_a_fresh_optimizer(tmp_path):
    """A model that was warmed up trains like one that was loaded with the warm weights."""
    path = model_dir(tmp_path / "model")
    warm = trainer_of(path)
    work = batches()
    for batch in work[:2]:
        warm.step(batch)
    saved = warm.save(tmp_path / "checkpoints")
    fresh = trainer_of(saved)
    assert fresh.steps_done == 0
    assert [warm.step(batch).loss for batch in work[2:]] == [fresh.step(batch).loss for batch in work[2:]]
    assert_same_weights(warm.weights(), fresh.weights())


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_checkpoint_is_a_complete_model_directory(tmp_path, family):
    path = model_dir(tmp_path / "model", family)
    trainer = trainer_of(path)
    trainer.step(random_batch(0))
    saved = trainer.save(tmp_path / "checkpoints")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (saved / name).read_text() == (path / name).read_text()
    assert "headrace" not in (saved / "config.json").read_text()
    assert not list(saved.rglob("*.bin")) + list(saved.rglob("*.pt"))
    with safe_open(saved / "trainer" / "optimizer.safetensors", "pt") as file:
        assert "exp_avg/model.embed_tokens.weight" in file.keys()  # noqa: SIM118 - not a mapping
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    assert_same_weights(dict(trainer.weights()), {name: p.detach() for name, p in loaded.named_parameters()})


def test_scores_are_those_of_a_plain_forward(tmp_path):
    path = model_dir(tmp_path / "model", "gemma2")
    trainer = trainer_of(path)
    token_ids = np.random.default_rng(0).integers(3, 61, 17, dtype=np.int32)
    found = trainer.score(token_ids)
    assert found.dtype == np.float32
    with torch.no_grad():
        expected = sequence_logprobs(plain_model(path), torch.from_numpy(token_ids).long(), 1.0).numpy()
    np.testing.assert_allclose(found, expected, atol=5e-6)
    assert trainer.score(token_ids[:1]).shape == (0,)


def test_dropout_is_off(tmp_path):
    path = model_dir(tmp_path / "model")
    model = load_model(path)
    model.config.attention_dropout = 0.5
    model.train()
    trainer = Trainer(model, CISPO, TRAINING, total_steps=5, warm_start=WARM_START)
    assert not any(module.training for module in model.modules())
    assert trainer.step(random_batch(1)).loss == trainer_of(path).step(random_batch(1)).loss


def test_a_poisoned_batch_is_skipped_and_counted(tmp_path):
    trainer = trainer_of(model_dir(tmp_path / "model"))
    trainer.step(random_batch(1))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    report = trainer.step(poisoned(random_batch(2)))
    assert report.skipped
    assert report.skipped_steps == 1
    assert_same_weights(trainer.weights(), before)
    report = trainer.step(random_batch(3))
    assert not report.skipped
    assert report.skipped_steps == 1
    assert math.isfinite(report.loss)
    assert trainer.steps_done == 3


@pytest.mark.parametrize("loss", ["cispo", "grpo", "gspo"])
def test_a_loss_that_is_not_a_number_skips_the_step(tmp_path, monkeypatch, loss):
    """A clip has no slope there: the loss is not a number, but its gradient may be zero."""
    monkeypatch.setattr("headrace.training.trainer.check_numbers", lambda batch: None)
    trainer = trainer_of(model_dir(tmp_path / "model"), algorithm=AlgorithmConfig(loss=loss))
    trainer.step(random_batch(1))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    strange = random_batch(2)
    strange.logprobs[np.flatnonzero(strange.trained)[3]] = np.nan
    report = trainer.step(strange)
    assert report.skipped and report.skipped_steps == 1
    assert math.isnan(report.loss)
    assert_same_weights(before, trainer.weights())
    assert not trainer.step(random_batch(3)).skipped


def test_too_many_poisoned_batches_in_a_row_end_the_run(tmp_path):
    training = msgspec.structs.replace(TRAINING, max_skipped=2)
    trainer = trainer_of(model_dir(tmp_path / "model"), training=training)
    huge, empty = poisoned(random_batch(2)), random_batch(4)
    empty.trained[:] = False
    trainer.step(huge)
    trainer.step(random_batch(3))
    trainer.step(huge)
    saved = trainer.save(tmp_path / "checkpoints")
    with pytest.raises(HeadraceError, match=r"the last 2 steps were skipped .*max_skipped = 2"):
        trainer.step(huge)
    resumed = trainer_of(saved, training=training)
    resumed.load(saved)
    with pytest.raises(HeadraceError, match="the last 2 steps"):
        resumed.step(huge)
    # A batch with nothing to train is skipped too, and says nothing about the gradients.
    fresh = trainer_of(saved, training=training)
    assert [fresh.step(batch).skipped for batch in (empty, empty, huge, empty)] == [True] * 4
    with pytest.raises(HeadraceError, match="the last 2 steps"):
        fresh.step(huge)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rates": {"nowhere": 2.0}}, "no trainable parameter has 'nowhere'"),
        ({"optimizer": "adamw_8bit"}, "needs the package torchao"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_said_before_the_first_batch(tmp_path, monkeypatch, changes, message):
    for package in ("torchao", "torchao.optim"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=message):
        trainer_of(model_dir(tmp_path / "model"), training=msgspec.structs.replace(TRAINING, **changes))


def test_a_batch_without_trained_tokens_changes_nothing(tmp_path):
    trainer = trainer_of(model_dir(tmp_path / "model"))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    batch = random_batch(1)
    batch.trained[:] = False
    report = trainer.step(batch)
    assert report.skipped
    assert (report.loss, report.tokens) == (0.0, 0)
    assert_same_weights(trainer.weights(), before)


def test_the_policy_moves_towards_advantage(tmp_path):
    """Steps on one batch raise the probability of what was good and lower that of what was bad."""
    trainer = trainer_of(model_dir(tmp_path / "model"), training=TrainingConfig(learning_rate=1e-3), total_steps=20)
    batch = random_batch(5, groups=2, size=1)
    first = int(batch.lengths[0])
    batch.advantages[:] = np.where(batch.trained, np.where(np.arange(len(batch.trained)) < first, 1.0, -1.0), 0)

    def likelihoods():
        parts = batch.token_ids[:first], batch.token_ids[first:]
        masks = batch.trained[1:first], batch.trained[first + 1 :]
        return [float(trainer.score(part)[mask].sum()) for part, mask in zip(parts, masks, strict=True)]

    good, bad = likelihoods()
    for _ in range(5):
        trainer.step(batch)
    better, worse = likelihoods()
    assert better > good + 0.1
    assert worse < bad - 0.1
