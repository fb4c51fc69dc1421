"""Losses against values computed by hand, and gradients against formulas worked out without the code under test."""

from __future__ import annotations

import math
import re
import typing
from pathlib import Path

import pytest
import torch

from headrace.algorithms.losses.base import CORRECTIONS, LOSSES, TokenInputs, build_loss, imitation
from headrace.algorithms.losses.policy.cispo import cispo
from headrace.algorithms.losses.policy.decoupled_ppo import decoupled_ppo, recomputed_decoupled_ppo
from headrace.algorithms.losses.policy.distillation import distillation
from headrace.algorithms.losses.policy.dppo_tv import dppo_tv
from headrace.algorithms.losses.policy.grpo import clipped_grpo
from headrace.algorithms.losses.policy.gspo import gspo
from headrace.algorithms.losses.policy.reinforce import reinforce
from headrace.algorithms.losses.policy.sapo import sapo
from headrace.algorithms.losses.policy.topr import topr
from headrace.config.declared import correction_facts, loss_facts
from headrace.config.schema import AlgorithmConfig, names_of
from plain_losses import Tokens, plain_losses

RUN_DIRECTORY = Path(__file__).parents[3] / "docs/run_directory.md"
LOW, HIGH = 0.2, 0.28
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5, 3.0]
CASES = [(ratio, advantage) for ratio in RATIOS for advantage in (2.0, -1.0)]
VARIANTS = [*sorted(LOSSES), "recomputed"]
EVERY_LOSS = pytest.mark.parametrize("name", VARIANTS)
OF_REWARDS = pytest.mark.parametrize("name", [name for name in VARIANTS if name != "distillation"])


def loss_of(name, **given):
    """The loss of this name; `recomputed` is decoupled PPO with the proximal policy that comes with the tokens."""
    if name == "recomputed":
        return build_loss(AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed", **given))
    return build_loss(AlgorithmConfig(loss=name, **given))


def some(inputs, which, **changes):
    """Some of the tokens."""
    return TokenInputs(*(None if array is None else array[which] for array in inputs))._replace(**changes)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


def inputs_of(cases=CASES, sequences=None, lags=None, mu=-1.25):
    """Tokens with these (ratio, advantage), sampled with log mu; each a sequence of its own unless told."""
    ratios, advantages = double([ratio for ratio, _ in cases]), double([advantage for _, advantage in cases])
    behaviour = torch.full((len(cases),), mu, dtype=torch.float64)
    return TokenInputs(
        logprobs=(behaviour + ratios.log()).requires_grad_(),
        behaviour=behaviour,
        advantages=advantages,
        sequences=torch.tensor(sequences or list(range(len(cases)))),
        lags=double(lags or [0] * len(cases)),
        proximal=behaviour + ratios.log() / 3,
        teacher=torch.linspace(-3.0, -0.5, len(cases), dtype=torch.float64),
    )


def gradient(values, logprobs):
    return torch.autograd.grad(values.sum(), logprobs)[0]


def check(result, inputs, values, slopes, clipped=None):
    """Both by hand: the losses, and their derivatives by log pi."""
    torch.testing.assert_close(result.values.detach(), double(values), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(result.values, inputs.logprobs), double(slopes), rtol=0, atol=1e-12)
    if clipped is not None:
        assert float(result.sums["clip_fraction"]) == clipped


def test_cispo_by_hand():
    inputs = inputs_of()
    values = [-min(r, 1.28) * a * (-1.25 + math.log(r)) for r, a in CASES]
    slopes = [-min(r, 1.28) * a for r, a in CASES]
    check(cispo(inputs, clip_high=HIGH), inputs, values, slopes, clipped=4)


def test_grpo_by_hand():
    inputs = inputs_of()
    values = [-min(r * a, min(max(r, 0.8), 1.28) * a) for r, a in CASES]
    # Only a token that has gone too far in the direction of its advantage loses its gradient.
    silent = {(1.5, 2.0), (3.0, 2.0), (0.5, -1.0)}
    slopes = [0.0 if (r, a) in silent else -r * a for r, a in CASES]
    check(clipped_grpo(inputs, clip_low=LOW, clip_high=HIGH), inputs, values, slopes, clipped=3)


def test_dapo_is_grpo_with_more_room_above():
    cases = [(1.25, 1.0), (1.3, 1.0), (0.75, -1.0), (0.85, -1.0)]
    for name, values, slopes in [
        ("dapo", [-1.25, -1.28, 0.8, 0.85], [-1.25, 0, 0, 0.85]),
        ("grpo", [-1.2, -1.2, 0.8, 0.85], [0, 0, 0, 0.85]),
    ]:
        inputs = inputs_of(cases)
        check(build_loss(AlgorithmConfig(loss=name))(inputs), inputs, values, slopes)


def test_gspo_by_hand():
    # Sequences of ratio 1 (2 x 1/2), 1.1 (geometric mean of 1.21 and 1, and again for A < 0), and 0.9 alone.
    cases = [(2.0, 3.0), (0.5, 3.0), (1.21, 1.0), (1.0, 1.0), (1.21, -1.0), (1.0, -1.0), (0.9, -2.0)]
    inputs = inputs_of(cases, sequences=[0, 0, 1, 1, 2, 2, 3])
    values = [-3.0, -3.0, -1.05, -1.05, 1.1, 1.1, 1.9]
    slopes = [-3.0, -3.0, 0, 0, 1.1, 1.1, 0]
    check(gspo(inputs, clip_low=0.05, clip_high=0.05), inputs, values, slopes, clipped=3)
    # And with its own narrow region: 1.0003 is inside, 1.0005 is out.
    inputs = inputs_of([(1.0003, 1.0), (1.0005, 1.0), (0.9998, -1.0), (0.9996, -1.0)])
    check(gspo(inputs), inputs, [-1.0003, -1.0004, 0.9998, 0.9997], [-1.0003, 0, 0.9998, 0])


def test_gspo_has_the_gradient_of_the_sequence_ratio():
    tokens, logp = random_tokens(5, spread=0.05)
    sequences = torch.tensor(tokens.sequences)
    advantages = torch.linspace(-1.0, 1.5, 9, dtype=torch.float64)[sequences]
    inputs = TokenInputs(logp, tokens.behaviour, advantages, sequences, double(tokens.lags))
    found = gradient(gspo(inputs, clip_low=0.01, clip_high=0.02).values, logp)
    free = logp.detach().clone().requires_grad_()
    objective = torch.zeros((), dtype=torch.float64)
    for own in set(tokens.sequences):
        mine = sequences == own
        ratio = (free[mine] - tokens.behaviour[mine]).mean().exp()
        a = advantages[mine][0]
        # The mean over tokens of a sequence gives every token the same: its length times the sequence's own loss.
        objective = objective - int(mine.sum()) * torch.minimum(ratio * a, ratio.clamp(0.99, 1.02) * a)
    [expected] = torch.autograd.grad(objective, free)
    assert 0 < int((found == 0).sum()) < len(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_sapo_by_hand():
    inputs = inputs_of([(1.0, 2.0), (1.0, -1.0), (2.0, 1.0), (3.0, -1.0)])

    def sigmoid(x):
        return 1 / (1 + math.exp(-x))

    up, down = sigmoid(1.0), sigmoid(1.05 * 2)
    values = [-2 * 2.0, 2 / 1.05, -4 * up, 4 / 1.05 * down]
    # d/d log pi = 4 sigma' r A: at ratio 1 exactly A.
    slopes = [-2.0, 1.0, -4 * up * (1 - up) * 2.0, 4 * down * (1 - down) * 3.0]
    check(sapo(inputs, tau_positive=1.0, tau_negative=1.05), inputs, values, slopes, clipped=0)


def test_dppo_tv_by_hand():
    # Mu is 1/2. The probability moves by +0.25, +0.15, -0.25 and -0.15; only the way of the advantage's sign counts.
    ratios = [1.5, 1.3, 0.5, 0.7]
    cases = [(r, a) for r in ratios for a in (2.0, -1.0)]
    inputs = inputs_of(cases, mu=math.log(0.5))
    masked = {(1.5, 2.0), (0.5, -1.0)}
    expected = [0.0 if case in masked else -case[0] * case[1] for case in cases]
    check(dppo_tv(inputs, delta=0.2), inputs, expected, expected, clipped=2)
    # A rare token may move by any ratio.
    inputs = inputs_of([(20.0, 1.0)], mu=math.log(0.001))
    check(dppo_tv(inputs, delta=0.2), inputs, [-20.0], [-20.0], clipped=0)


def test_topr_by_hand():
    # Sequence ratios: 3 x 1/2 = 1.5 twice, 1/2 x 1/2 = 1/4 twice; the sign of the advantage differs.
    cases = [(3.0, 1.0), (0.5, 1.0), (3.0, -1.0), (0.5, -1.0), (0.5, 2.0), (0.5, 2.0), (0.5, -2.0), (0.5, -2.0)]
    inputs = inputs_of(cases, sequences=[0, 0, 1, 1, 2, 2, 3, 3])
    weights = [1, 1, 1, 1, 1, 1, 0.25, 0.25]
    slopes = [-w * a for w, (_, a) in zip(weights, cases, strict=True)]
    values = [slope * (-1.25 + math.log(r)) for slope, (r, _) in zip(slopes, cases, strict=True)]
    check(topr(inputs), inputs, values, slopes, clipped=2)


def test_reinforce_by_hand():
    inputs = inputs_of()
    slopes = [-a for _, a in CASES]
    values = [-a * (-1.25 + math.log(r)) for r, a in CASES]
    check(reinforce(inputs), inputs, values, slopes, clipped=0)


def test_decoupled_ppo_by_hand():
    # At lag 0 the proximal policy is the policy, at lag 1 the sampler, at lag 2 the geometric mean of the two.
    cases = [(1.44, 1.0)] * 3 + [(1.69, 1.0), (0.25, -1.0), (1.21, 3.0)]
    inputs = inputs_of(cases, lags=[0, 1, 2, 2, 2, 4])
    # Lag 2: weight sqrt(rho), ratio sqrt(rho); 1.3 is clipped to 1.2, 0.5 to 0.8.
    values = [-1.44, -1.2, -1.44, -1.3 * 1.2, 0.5 * 0.8, -3 * 1.21]
    slopes = [-1.44, 0, -1.44, 0, 0, -3 * 1.21]
    check(decoupled_ppo(inputs), inputs, values, slopes, clipped=3)
    inputs = inputs_of(cases, lags=[0, 1, 2, 2, 2, 4])
    # The sampler alone: clipped GRPO.
    expected = clipped_grpo(inputs)
    slopes = gradient(expected.values, inputs.logprobs).tolist()
    check(decoupled_ppo(inputs, proximal_mix=1.0), inputs, expected.values.tolist(), slopes)


def test_recomputed_decoupled_ppo_by_hand():
    # The proximal policy has twice, once and half the sampler's probability; the policy 1.1, 1.5 and 0.5 times its.
    ratios, shares, advantages = [2.2, 1.5, 0.25], [2.0, 1.0, 0.5], [1.0, 1.0, -2.0]
    inputs = inputs_of(list(zip(ratios, advantages, strict=True)))
    inputs = inputs._replace(proximal=inputs.behaviour + double(shares).log())
    check(recomputed_decoupled_ppo(inputs), inputs, [-2 * 1.1, -1.2, 0.5 * 0.8 * 2], [-2.2, 0, 0], clipped=2)


def test_distillation_by_hand():
    # The teacher finds the tokens e times, 1 and 1/2 times as likely as the policy does; rewards are not looked at.
    inputs = inputs_of([(1.0, 9.0), (0.5, -9.0), (2.0, 0.0)])
    gaps = [1.0, 0.0, -math.log(2)]
    inputs = inputs._replace(teacher=inputs.logprobs.detach() + double(gaps))
    slopes = [-1.0, 0.0, 1.28 * math.log(2)]
    values = [s * float(p) for s, p in zip(slopes, inputs.logprobs, strict=True)]
    result = distillation(inputs)
    check(result, inputs, values, slopes, clipped=1)
    assert float(result.sums["teacher_kl"]) == pytest.approx(-1 + math.log(2))


def test_metrics_by_hand_and_over_micro_batches():
    inputs = inputs_of()
    ratios = [r for r, _ in CASES]
    for name in VARIANTS:
        loss = loss_of(name, corrections=["tis"])
        sums = loss(inputs).sums
        assert float(sums["ratio"]) == pytest.approx(sum(ratios))
        assert float(sums["kl_k1"]) == pytest.approx(-sum(math.log(r) for r in ratios))
        assert float(sums["kl_k3"]) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios))
        assert float(sums["tis_fraction"]) == 2
        first, second = (
            loss(some(inputs, cut, sequences=torch.arange(n))).sums
            for cut, n in ((slice(0, 5), 5), (slice(5, None), 7))
        )
        for key, value in sums.items():
            assert not value.requires_grad
            assert float(first[key] + second[key]) == pytest.approx(float(value))


def random_tokens(seed=0, count=40, sequences=9, spread=0.4):
    """Recorded tokens of several sequences, mixed up, and the policy's own log-probabilities beside them."""
    generator = torch.Generator().manual_seed(seed)
    logp = (torch.randn(count, 7, dtype=torch.float64, generator=generator)).log_softmax(-1)[:, 0]
    noise = spread * torch.randn(count, dtype=torch.float64, generator=generator)
    advantages = torch.randn(count, dtype=torch.float64, generator=generator)
    order = torch.randperm(count, generator=generator) % sequences
    lags = torch.randint(0, 4, (count,), generator=generator)
    proximal = logp + spread / 2 * torch.randn(count, dtype=torch.float64, generator=generator)
    teacher = logp + torch.randn(count, dtype=torch.float64, generator=generator)
    tokens = Tokens(logp + noise, advantages, order.tolist(), lags.tolist(), proximal, teacher)
    return tokens, logp.requires_grad_()


def inputs_from(tokens, logp, **changes):
    inputs = TokenInputs(
        logp,
        tokens.behaviour,
        tokens.advantages,
        torch.tensor(tokens.sequences),
        double(tokens.lags),
        proximal=tokens.proximal,
        teacher=tokens.teacher,
    )
    return inputs._replace(**changes)


SETS = [[], ["tis"], ["sequence_tis"], ["icepop"], ["mis"], ["opsm"], ["opsm", "mis", "icepop", "tis"]]


@EVERY_LOSS
@pytest.mark.parametrize("corrections", SETS, ids="+".join)
def test_values_and_gradients_against_the_definition(name, corrections):
    tokens, logp = random_tokens(3, spread=0.8)
    result = loss_of(name, corrections=corrections)(inputs_from(tokens, logp))
    free = logp.detach().clone().requires_grad_()
    expected = plain_losses(name, free, logp.detach(), tokens, corrections=corrections)
    torch.testing.assert_close(result.values, expected, rtol=0, atol=1e-10)
    slopes = gradient(expected, free)
    torch.testing.assert_close(gradient(result.values, logp), slopes, rtol=0, atol=1e-10)
    assert slopes.count_nonzero() > 0
    for correction in corrections:
        assert 0 < float(result.sums[f"{correction}_fraction"]) < len(logp)


@EVERY_LOSS
def test_gradient_against_finite_differences(name):
    tokens, logp = random_tokens(4)
    clips = (0.03, 0.05) if name == "gspo" else None
    given = {} if clips is None else {"clip_low": clips[0], "clip_high": clips[1]}
    found = gradient(loss_of(name, **given)(inputs_from(tokens, logp)).values, logp)
    held, step = logp.detach(), 1e-6
    for place in range(0, 40, 3):
        shift = torch.zeros_like(held)
        shift[place] = step
        above, below = (plain_losses(name, held + s, held, tokens, clips=clips).sum() for s in (shift, -shift))
        assert float(found[place]) == pytest.approx(float((above - below) / (2 * step)), abs=1e-7)


@EVERY_LOSS
def test_clipping_and_mixing_are_configured(name):
    tokens, logp = random_tokens(6)
    given = {"clip_low": 0.04, "clip_high": 0.06}
    given |= {"proximal_mix": 0.25} if name != "recomputed" else {}
    found = loss_of(name, **given)(inputs_from(tokens, logp)).values
    expected = plain_losses(name, logp, logp, tokens, clips=(0.04, 0.06), mix=0.25)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@OF_REWARDS
def test_no_advantage_no_gradient(name):
    tokens, logp = random_tokens(1)
    inputs = inputs_from(tokens, logp, advantages=torch.zeros(40, dtype=torch.float64))
    for corrections in SETS:
        values = loss_of(name, corrections=corrections)(inputs).values
        assert gradient(values, logp).count_nonzero() == 0


@OF_REWARDS
@pytest.mark.parametrize("corrections", SETS, ids="+".join)
def test_on_policy_all_are_the_policy_gradient(name, corrections):
    """At pi = mu every ratio is 1, inside every trust region: all losses have the gradient -A, with any correction."""
    tokens, logp = random_tokens(2)
    values = loss_of(name, corrections=corrections)(
        inputs_from(tokens, logp, behaviour=logp.detach(), proximal=logp.detach())
    ).values
    torch.testing.assert_close(gradient(values, logp), -tokens.advantages, rtol=0, atol=1e-12)


@EVERY_LOSS
def test_the_order_of_tokens_and_the_numbers_of_sequences_do_not_matter(name):
    tokens, logp = random_tokens(7)
    loss = loss_of(name, corrections=["tis", "sequence_tis", "icepop", "mis", "opsm"])
    whole = inputs_from(tokens, logp)
    expected = loss(whole).values
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    moved = some(whole, order, sequences=8 - whole.sequences[order])
    torch.testing.assert_close(loss(moved).values, expected[order], rtol=0, atol=1e-12)
    # Whole sequences alone give what they give among others.
    for own in (0, 5):
        mine = whole.sequences == own
        alone = some(whole, mine, sequences=torch.zeros(int(mine.sum()), dtype=torch.int64))
        torch.testing.assert_close(loss(alone).values, expected[mine], rtol=0, atol=1e-12)


def test_a_hopeless_ratio_stays_finite():
    for name in VARIANTS:
        for corrections in SETS:
            for behaviour in (-500.0, -1e-3):
                logp = torch.tensor([-1.0, -400.0], requires_grad=True)
                mu = torch.full((2,), behaviour)
                inputs = TokenInputs(logp, mu, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), torch.ones(2))
                for other in (-300.0, -1e-3):
                    every = dict.fromkeys(("proximal", "reference", "teacher"), torch.full((2,), other))
                    result = loss_of(name, corrections=corrections, kl="k3")(inputs._replace(**every))
                    assert torch.isfinite(result.values).all()
                    assert torch.isfinite(gradient(result.values, logp)).all()
                    assert all(math.isfinite(float(value)) for value in result.sums.values())


def test_imitation_is_likelihood():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 7, dtype=torch.float64, generator=generator).requires_grad_()
    picked = torch.randint(7, (40,), generator=generator)
    tokens, _ = random_tokens(3)
    result = imitation(inputs_from(tokens, logits.log_softmax(-1)[range(40), picked]))
    expected = torch.nn.functional.cross_entropy(logits, picked, reduction="none")
    torch.testing.assert_close(result.values, expected, rtol=0, atol=1e-12)
    assert float(result.sums["nll"]) == pytest.approx(float(expected.sum()))
    [found] = torch.autograd.grad(result.values.sum(), logits)
    onehot = torch.nn.functional.one_hot(picked, 7)
    torch.testing.assert_close(found, logits.detach().softmax(-1) - onehot, rtol=0, atol=1e-12)


def test_every_name_of_the_configuration_builds_and_no_other():
    hints = typing.get_type_hints(AlgorithmConfig)
    assert list(names_of(AlgorithmConfig, "loss")) == sorted(LOSSES)
    [correction] = typing.get_args(hints["corrections"])
    assert set(typing.get_args(correction)) == set(CORRECTIONS)
    for name in LOSSES:
        for corrections in SETS:
            assert callable(build_loss(AlgorithmConfig(loss=name, corrections=corrections)))


def test_every_metric_is_in_the_documents():
    tokens, logp = random_tokens(8)
    inputs = inputs_from(tokens, logp, reference=logp.detach(), entropy=logp.detach().abs())
    metrics = set(imitation(inputs).sums)
    for name in VARIANTS:
        whole = loss_of(name, corrections=sorted(CORRECTIONS), kl="k3", entropy_weight=0.0, reward_kl="k1")
        metrics |= whole(inputs).sums.keys()
    assert {"entropy", "reference_kl", "reward_kl", "teacher_kl", "tis_fraction"} < metrics
    described = RUN_DIRECTORY.read_text().partition("\n## The metrics\n")[2]
    [row] = [line for line in described.splitlines() if line.startswith("| `step` |")]
    assert metrics | {"update_ratio", "rerouted"} <= set(re.findall(r"\w+", row))


class Watched:
    """A configuration that remembers which of its keys were looked at."""

    def __init__(self):
        self.seen = set()

    def __getattr__(self, key):
        self.seen.add(key)
        return getattr(AlgorithmConfig(), key)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_loss_declares_the_keys_that_it_reads(name):
    config = Watched()
    LOSSES[name](config)
    assert config.seen == set(loss_facts(name).reads)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_a_correction_declares_the_keys_that_it_reads(name):
    config = Watched()
    CORRECTIONS[name](config)
    assert config.seen == set(correction_facts().reads[name])
