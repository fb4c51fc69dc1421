"""Distillation on a teacher's likeliest tokens: values and gradients against plain torch, one sequence at a time."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from random_models import VOCABULARY, AllDouble, model_dir, random_batch, twins
from reference_loop import batch_loss

from headrace.algorithms.losses.base import build_loss
from headrace.algorithms.losses.teacher import LONGEST_GAP, TopTokens, top_divergence
from headrace.config.declared import needs
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.models.loading import load_model
from headrace.training import logprobs
from headrace.training.logprobs import Likeliest, read_row
from headrace.training.policies import FrozenPolicy
from headrace.training.rows import plan
from headrace.training.trainer import Trainer, accumulate
from headrace.types import TeacherScores

K = 5


def other_model(family, dtype=torch.float64, seed=3):
    """A teacher that disagrees with the policy, twice: as `twins` gives it."""
    pair = twins(family, dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in pair[0].parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype, generator=noise))
    pair[1].load_state_dict(pair[0].state_dict())
    return pair


def sequences_of(batch):
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        places = np.flatnonzero(batch.trained[start:end])
        yield start, torch.tensor(batch.token_ids[start:end].astype("int64")), places


def distributions(model, tokens, places, temperature):
    """The whole distribution from which each of these tokens was drawn, as probabilities."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    return torch.softmax(logits[places - 1] / temperature, dim=-1)


def plain_divergence(policy, teacher, ids, direction):
    """KL by its definition, over the tokens `ids` of one position and the rest of the vocabulary as one more token."""
    rest = [i for i in range(VOCABULARY) if i not in ids]
    total = 0.0
    for event in [*([i] for i in ids), rest]:
        q, p = policy[event].sum(), teacher[event].sum()
        total = total + (p * torch.log(p / q) if direction == "forward" else q * torch.log(q / p))
    return total


def plain_loss(policy, teacher, batch, direction):
    total = 0.0
    for start, tokens, places in sequences_of(batch):
        q = distributions(policy, tokens, places, batch.temperature)
        with torch.no_grad():
            p = distributions(teacher, tokens, places, batch.temperature)
        for number, place in enumerate(places):
            ids = p[number].topk(K).indices.tolist()
            kl = plain_divergence(q[number], p[number], ids, direction)
            total = total + float(batch.weights[start + place]) * kl
    return total


def recorded_by(teacher, batch, dtype=np.float64):
    """What a teacher outside of the trainer would have recorded."""
    found = TeacherScores.of_unscored(len(batch.token_ids), K)
    found = TeacherScores(**{name: getattr(found, name).copy() for name in found.__struct_fields__})
    found.top_logprobs, found.tails = found.top_logprobs.astype(dtype), found.tails.astype(dtype)
    for start, tokens, places in sequences_of(batch):
        with torch.no_grad():
            p = distributions(teacher, tokens, places, batch.temperature)
        for number, place in enumerate(places):
            ids = np.sort(p[number].topk(K).indices.numpy())
            at = start + place
            found.top_ids[at] = ids
            found.top_logprobs[at] = p[number][ids].log()
            found.tails[at] = math.log(1 - float(p[number][ids].sum()))
            found.logprobs[at] = float(p[number][tokens[place]].log())
            found.versions[at] = 0
    return found


def gradients(model, batch, algorithm, teacher=None, micro_batch_tokens=10_000, share_prefixes=True):
    model.zero_grad()
    policies = {"teacher": FrozenPolicy(teacher, top=Likeliest(K, VOCABULARY))} if teacher is not None else None
    result = accumulate(
        model,
        batch,
        build_loss(algorithm),
        micro_batch_tokens=micro_batch_tokens,
        share_prefixes=share_prefixes,
        policies=policies,
        entropy=needs(algorithm).entropy,
    )
    return result, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


def algorithm_of(direction, **more):
    return AlgorithmConfig(
        **{"loss": "distillation", "teacher": "t", "teacher_divergence": direction, "teacher_top_k": K} | more
    )


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_and_cut_into_rows_and_chunks(family, direction, monkeypatch):
    with AllDouble():
        packed, plain = twins(family, torch.float64)
        teacher, plain_teacher = other_model(family)
        batch = random_batch(1, temperature=0.8)
        expected_loss = plain_loss(plain, plain_teacher, batch, direction)
        expected_loss.backward()
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        recorded = msgspec.structs.replace(batch, teacher=recorded_by(plain_teacher, batch))
        assert float(expected_loss.detach()) > 0.05
        for chunk, budget, share in [(1 << 20, 10_000, True), (7 * VOCABULARY, 30, True), (7 * VOCABULARY, 1, False)]:
            monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
            for each, held in ((batch, teacher), (recorded, None)):
                result, found = gradients(packed, each, algorithm_of(direction), held, budget, share)
                assert (result.micro_batches == 1) == (budget == 10_000)
                assert abs(result.loss - float(expected_loss.detach())) < 1e-9
                assert_equal_gradients(found, expected, 1e-9)
                assert result.metrics["teacher_kl"] > 0.05


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_close_in_float32(direction):
    packed, plain = twins("llama")
    teacher, plain_teacher = other_model("llama", torch.float32)
    batch = random_batch(2, groups=4, size=4)
    expected_loss = plain_loss(plain.double(), plain_teacher.double(), batch, direction)
    expected_loss.backward()
    expected = {name: p.grad.float() for name, p in plain.named_parameters() if p.grad is not None}
    recorded = msgspec.structs.replace(batch, teacher=recorded_by(plain_teacher, batch, np.float32))
    for each, held in ((batch, teacher), (recorded, None)):
        result, found = gradients(packed, each, algorithm_of(direction), held, 64)
        assert abs(result.loss - float(expected_loss.detach())) < 1e-6
        assert_equal_gradients(found, expected, 1e-6)


@pytest.mark.parametrize("divergence", ["sampled", "forward", "reverse"])
def test_added_to_a_reward(divergence):
    """The gradient of a loss with a teacher is the sum of that loss's own and 0.3 times that of distillation."""
    with AllDouble():
        packed, plain = twins("llama", torch.float64)
        _, plain_teacher = other_model("llama")
        batch = random_batch(3)
        batch = msgspec.structs.replace(batch, teacher=recorded_by(plain_teacher, batch))
        reward, of_reward = gradients(packed, batch, AlgorithmConfig(loss="grpo"))
        alone = algorithm_of(divergence, teacher_top_k=K if divergence != "sampled" else 8)
        taught, of_teacher = gradients(packed, batch, alone)
        both = msgspec.structs.replace(alone, loss="grpo", teacher_weight=0.3)
        result, found = gradients(packed, batch, both)
        assert result.loss == pytest.approx(reward.loss + 0.3 * taught.loss, abs=1e-12)
        assert_equal_gradients(found, {n: of_reward[n] + 0.3 * of_teacher[n] for n in of_reward}, 1e-12)
        assert result.metrics["teacher_kl"] == taught.metrics["teacher_kl"]
        assert result.metrics["clip_fraction"] == reward.metrics["clip_fraction"]
        if divergence != "sampled":
            plain.zero_grad()
            loss = batch_loss(plain, batch, AlgorithmConfig(loss="grpo"))
            loss = loss + 0.3 * plain_loss(plain, plain_teacher, batch, divergence)
            loss.backward()
            assert_equal_gradients(found, {n: p.grad for n, p in plain.named_parameters()}, 1e-9)


def test_two_sets_of_tokens_at_one_position_and_temperatures():
    """Answers to one prompt whose first tokens were scored by different teachers, at different temperatures."""
    with AllDouble(), torch.no_grad():
        packed, plain = twins("llama", torch.float64)
        batch = random_batch(4, groups=1, size=3)
        [row] = plan(batch, micro_batch_tokens=1000, share_prefixes=True)
        assert len(set(row.predictors)) < len(row.predictors)
        rng = np.random.default_rng(0)
        top = np.sort(np.stack([rng.choice(VOCABULARY, 4, replace=False) for _ in row.targets]), axis=1).astype(
            np.int32
        )
        heat = np.where(np.arange(len(row.targets)) % 2, 0.7, 1.4).astype(np.float32)
        for chunk in (None, 2 * VOCABULARY):
            found = read_row(packed, row, top=top, temperature=heat, chunk_elements=chunk)
            number = 0
            for _, tokens, places in sequences_of(batch):
                logits = plain(input_ids=tokens[None], use_cache=False).logits[0][places - 1]
                for place, each in zip(places, logits, strict=True):
                    whole = torch.log_softmax(each / float(heat[number]), dim=-1)
                    chosen = whole[torch.from_numpy(top[number]).long()]
                    torch.testing.assert_close(found.logprobs[number], whole[tokens[place]], rtol=0, atol=1e-10)
                    torch.testing.assert_close(found.top[number], chosen, rtol=0, atol=1e-10)
                    assert float(found.tail[number]) == pytest.approx(math.log(1 - float(chosen.exp().sum())), abs=1e-9)
                    number += 1


def test_by_hand():
    """A teacher of (1/2, 1/4 | 1/4) and a policy of (1/4, 1/4 | 1/2)."""
    half, quarter = math.log(0.5), math.log(0.25)
    top = TopTokens(
        policy=torch.tensor([[quarter, quarter]]),
        policy_tail=torch.tensor([half]),
        teacher=torch.tensor([[half, quarter]]),
        teacher_tail=torch.tensor([quarter]),
    )
    assert float(top_divergence(top, "forward")) == pytest.approx(0.25 * math.log(2))
    assert float(top_divergence(top, "reverse")) == pytest.approx(0.25 * math.log(2))
    same = top._replace(teacher=top.policy, teacher_tail=top.policy_tail)
    assert float(top_divergence(same, "forward")) == float(top_divergence(same, "reverse")) == 0


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_teacher_that_is_sure_leaves_everything_finite(direction):
    logits = torch.tensor([[3.0, 1.0, 0.5]], requires_grad=True)
    logp = logits.log_softmax(-1)
    top = TopTokens(logp[:, :1], logp[:, 1:].logsumexp(-1), torch.zeros(1, 1), torch.full((1,), -torch.inf))
    value = top_divergence(top, direction)
    [slope] = torch.autograd.grad(value.sum(), logits)
    assert torch.isfinite(value).all()
    assert torch.isfinite(slope).all()
    assert float(slope[0, 0]) < 0 < float(slope[0, 1])
    if direction == "reverse":
        tail = 1 - float(logp[0, 0].exp())
        assert float(value) == pytest.approx((1 - tail) * float(logp[0, 0]) + tail * LONGEST_GAP, abs=1e-5)


def test_a_token_that_the_policy_never_draws_adds_nothing_to_the_reverse_divergence():
    own = torch.tensor([[math.log(0.25), math.log(0.75), -math.inf]], dtype=torch.float64, requires_grad=True)
    teacher = torch.log(torch.tensor([[0.5, 0.3]], dtype=torch.float64))
    value = top_divergence(TopTokens(own[:, :2], own[:, 2], teacher, torch.tensor([math.log(0.2)])), "reverse")
    value.sum().backward()
    assert float(value.detach()) == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(2.5))
    assert torch.isfinite(own.grad).all()


def test_recorded_scores_are_left_out_where_the_trainer_has_the_teacher(tmp_path):
    """A resumed run may have rollouts that a teacher outside of the trainer has scored, beside others without."""
    path, batch = model_dir(tmp_path / "model"), random_batch(1)
    recorded = TeacherScores.of_unscored(len(batch.token_ids), K)
    algorithm = AlgorithmConfig(loss="distillation", teacher="t", teacher_divergence="forward", teacher_top_k=K)
    reports = []
    for scores in (None, recorded):
        model, teacher = load_model(path), other_model("llama", torch.float32)[0]
        trainer = Trainer(
            model, algorithm, TrainingConfig(), total_steps=9, warm_start=WarmStartConfig(), teacher=teacher
        )
        reports.append(trainer.step(msgspec.structs.replace(batch, teacher=scores)))
    assert reports[0].metrics == reports[1].metrics
    assert reports[0].metrics["teacher_kl"] > 0
