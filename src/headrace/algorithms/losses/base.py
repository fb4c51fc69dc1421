"""The interface of losses: a loss is a pure function of flat arrays over trained tokens.

A loss knows no batches or weights, and it never normalises: the step multiplies its values by the batch's weights and
adds them up. Metrics are sums over tokens, so the metrics of micro-batches add up too. All tokens of a sequence come in
one call, so a loss may look at whole sequences.

A loss of your own is a file with a `build` function, selected in the configuration by `loss = "my_loss.py:build"`
(docs/extending.md shows one). A loss that needs more declares it beside `build`, see
`headrace.config.declared.LossFacts`: `NEEDS = ("reference",)` asks for a field of `TokenInputs`, and
`READS = ("clip_high",)` names keys of [algorithm].
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import torch

from headrace.algorithms.losses.teacher import TopTokens
from headrace.config.schema import AlgorithmConfig
from headrace.errors import ConfigError
from headrace.reference import call_factory, import_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped at this value, because larger ones only lead to overflow."""


class TokenInputs(NamedTuple):
    """The inputs of a loss for N trained tokens; every array is [N]. The last five are present if a loss asks for them.

    The log-probabilities of every policy are at the sampling temperature, and over the tokens that sampling kept.
    """

    logprobs: torch.Tensor
    """Log pi, differentiable: the log-probabilities of the policy in training."""
    behaviour: torch.Tensor
    """Log mu: the log-probability that the engine recorded when it sampled the token."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """int64: the sequence that a token belongs to, numbered from 0 within the call. A call always has whole sequences,
    one after the other, with their tokens in order."""
    lags: torch.Tensor
    """How many versions old the token is, in the dtype of `logprobs`."""
    weight_cap: torch.Tensor | None = None
    """The largest importance weight that the token may have in the gradient; see `capped`. None without a limit."""
    weight_floor: torch.Tensor | None = None
    """The smallest importance weight that the token may have in the gradient; see `capped`. None without a limit."""
    proximal: torch.Tensor | None = None
    """The log-probabilities under the weights with which the version in training began."""
    reference: torch.Tensor | None = None
    """The log-probabilities under the weights before the first policy step; for a model with an adapter, under its
    base."""
    teacher: torch.Tensor | None = None
    """The log-probabilities under the teacher, the model to learn from."""
    entropy: torch.Tensor | None = None
    """The entropy of pi at the token's position, differentiable if the loss has an entropy bonus."""
    top: TopTokens | None = None
    """The teacher's likeliest tokens at the token's position, if a loss asks for the teacher and `[algorithm]
    teacher_divergence` is `forward` or `reverse`."""


class TokenLoss(NamedTuple):
    """The losses of N trained tokens."""

    values: torch.Tensor
    """The loss of each token, [N], differentiable with respect to the policy's log-probabilities."""
    sums: dict[str, torch.Tensor]
    """Metrics as detached sums over the N tokens. Divide by the number of tokens of the step to get means."""
    parts: dict[str, torch.Tensor] = {}
    """The components that `values` is the sum of, detached, [N] each. Empty if there is only one."""


Loss = Callable[[TokenInputs], TokenLoss]
"""A loss function, which returns the loss of each token."""


class Corrected(NamedTuple):
    """The result of a correction for N tokens."""

    cap: torch.Tensor
    """[N], the largest importance weight that a token may have. Infinite without a limit."""
    kept: torch.Tensor
    """[N], bool: whether a token is kept. The loss of the other tokens is zero."""
    floor: torch.Tensor | None = None
    """[N], the smallest importance weight that a token may have. None without a limit."""
    changed: torch.Tensor | None = None
    """[N], bool: which tokens count as changed. By default those that are left out or whose ratio is limited."""


Correction = Callable[[TokenInputs], Corrected]
"""A rule for tokens on which policy and sampler disagree. It goes by recorded ratios and is not differentiable."""

T = TypeVar("T")

LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {}
"""Every policy loss by its name in `[algorithm] loss`. The losses are the modules of `policy`."""

CORRECTIONS: dict[str, Callable[[AlgorithmConfig], Correction]] = {
    "tis": lambda config: partial(tis, cap=config.tis_cap),
    "sequence_tis": lambda config: partial(
        sequence_tis,
        low=config.sequence_tis_low,
        high=config.sequence_tis_high,
        ratio=config.sequence_tis_ratio,
    ),
    "icepop": lambda config: partial(icepop, low=config.icepop_low, high=config.icepop_high),
    "mis": lambda config: partial(mis, low=config.mis_low, high=config.mis_high, ratio=config.mis_ratio),
    "opsm": lambda config: partial(opsm, limit=config.opsm_limit),
}
"""Every correction by its name in `[algorithm] corrections`."""

READS = {
    "tis": ("tis_cap",),
    "sequence_tis": ("sequence_tis_ratio", "sequence_tis_low", "sequence_tis_high"),
    "icepop": ("icepop_low", "icepop_high"),
    "mis": ("mis_ratio", "mis_low", "mis_high"),
    "opsm": ("opsm_limit",),
}
"""The keys of [algorithm] that only this correction reads, by correction."""
GOES_BY_REWARDS = ("opsm",)
CAPS_WEIGHTS = ("tis", "sequence_tis")
"""The corrections that limit importance weights. The file of a loss that lets them do so says `CAPS_WEIGHTS = True`."""


def given(field: T | None) -> T:
    """Return an optional field, which the loss must have declared among its `NEEDS`."""
    assert field is not None
    return field


def build_loss(config: AlgorithmConfig, correct_above: int | None = None) -> Loss:
    """Build the configured loss. With `correct_above`, corrections change only tokens with a larger lag.

    An entropy bonus with a target is not part of it, because its weight changes from step to step.
    """
    if config.loss in LOSSES:
        loss = LOSSES[config.loss](config)
    else:
        loss = call_factory(f"[algorithm] loss: {config.loss}", import_function(config.loss), config)
        if not callable(loss):
            raise ConfigError(f"[algorithm] loss: {config.loss} returned a {type(loss).__name__}, not a loss function")
    if config.corrections:
        loss = corrected(loss, {name: CORRECTIONS[name](config) for name in config.corrections}, above=correct_above)
    if config.teacher_weight is not None:
        loss = with_teacher(loss, LOSSES["distillation"](config), config.teacher_weight)
    if config.entropy_weight is not None and config.entropy_target is None:
        loss = with_entropy(loss, config.entropy_weight)
    if config.kl != "none":
        loss = held_to_reference(loss, config.kl, config.kl_weight)
    if config.reward_kl != "none" and not config.critic:
        # A critic takes the payments from the rewards that it sees.
        loss = paying_for_divergence(loss, config.reward_kl, config.reward_kl_weight)
    return loss


def corrected(loss: Loss, corrections: Mapping[str, Correction], above: int | None = None) -> Loss:
    """Return the loss with these corrections.

    Each correction looks only at the recorded log-probabilities, so the order of corrections does not matter. A
    correction sees all tokens of whole sequences. With `above`, its decision counts only for tokens with a larger lag.

    Whether the loss clips or masks a token follows from the recorded log-probabilities alone: a correction limits the
    token's weight, or removes the token. `<name>_fraction` counts the tokens that a correction changed.
    """

    def whole(inputs: TokenInputs) -> TokenLoss:
        recorded = inputs._replace(logprobs=inputs.logprobs.detach())
        ratio = log_ratio(recorded.logprobs, inputs.behaviour).exp()
        cap, kept = unlimited(ratio), torch.ones_like(ratio, dtype=torch.bool)
        floor: torch.Tensor | None = None
        exempt = torch.zeros_like(kept) if above is None else inputs.lags <= above
        fractions: dict[str, torch.Tensor] = {}
        for name, correct in corrections.items():
            verdict = correct(recorded)
            changed = ~verdict.kept | (ratio > verdict.cap) if verdict.changed is None else verdict.changed
            fractions[f"{name}_fraction"] = (~exempt & changed).sum().to(ratio.dtype)
            cap = torch.where(exempt, cap, torch.minimum(cap, verdict.cap))
            kept = kept & (exempt | verdict.kept)
            if verdict.floor is not None:
                floor = torch.where(exempt, 0.0, verdict.floor)
        if floor is not None:
            floor = torch.minimum(floor, cap)
        result = loss(inputs._replace(weight_cap=cap, weight_floor=floor))
        return result._replace(values=torch.where(kept, result.values, 0.0), sums=result.sums | fractions)

    return whole


def with_teacher(loss: Loss, distillation: Loss, weight: float) -> Loss:
    """Return the loss plus weight x distillation at every trained token, also at tokens that corrections leave out."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result, taught = loss(inputs), distillation(inputs)
        result = result._replace(sums=result.sums | {"teacher_kl": taught.sums["teacher_kl"]})
        return plus(result, "teacher", weight * taught.values)

    return whole


def with_entropy(loss: Loss, weight: float) -> Loss:
    """Return the loss minus weight x entropy at every trained token. With weight 0 the entropy is only measured."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result, entropy = loss(inputs), given(inputs.entropy)
        result = result._replace(sums=result.sums | {"entropy": entropy.detach().sum()})
        return plus(result, "entropy", -weight * entropy) if weight else result

    return whole


def held_to_reference(loss: Loss, estimator: Literal["k1", "k2", "k3"], weight: float) -> Loss:
    """Return the loss plus weight x divergence at every trained token, also at tokens that corrections leave out."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result = loss(inputs)
        kl = divergence(inputs.logprobs, given(inputs.reference), estimator)
        result = result._replace(sums=result.sums | {"reference_kl": kl.detach().sum()})
        return plus(result, "kl", weight * kl)

    return whole


def paying_for_divergence(loss: Loss, estimator: Literal["k1", "k3"], weight: float) -> Loss:
    """Return the loss with advantages from rewards that pay for the divergence of the sampler from the reference.

    Every trained token pays weight x divergence, as a part of the reward that it earns when it is sampled. So the
    advantage of a token loses what it and the later tokens of its sequence pay. Nothing of this has a gradient.
    """

    def whole(inputs: TokenInputs) -> TokenLoss:
        paid = divergence(inputs.behaviour, given(inputs.reference), estimator).detach()
        advantages = inputs.advantages - weight * sums_to_go(paid, inputs.sequences)
        result = loss(inputs._replace(advantages=advantages))
        return result._replace(sums=result.sums | {"reward_kl": paid.sum()})

    return whole


def plus(result: TokenLoss, name: str, values: torch.Tensor) -> TokenLoss:
    """Return the loss with one more component. The loss to which the first one is added is the component `policy`."""
    parts = result.parts or {"policy": result.values.detach()}
    return TokenLoss(result.values + values, result.sums, parts | {name: values.detach()})


def divergence(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Return the estimate for each token, with d = log(pi / reference): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    On-policy, the expected gradient of k1 and k2 is that of KL(pi || reference), and that of k3 is the gradient of
    KL(reference || pi). The plain derivative of k1 is the derivative of log pi. Its mean over sampled tokens is zero,
    so it would not pull the policy towards the reference. For this reason the value of k1 is d, but its gradient is d
    times the gradient of log pi, which is also the gradient of k2.
    """
    gap = logprobs - reference
    if estimator == "k1":
        still = gap.detach()
        return still + still * (gap - still)
    if estimator == "k2":
        return gap.square() / 2
    # The clamped gap, because exp(-gap) overflows where the reference is far more likely than the policy.
    gap = log_ratio(logprobs, reference)
    return torch.expm1(-gap) + gap


def imitation(inputs: TokenInputs) -> TokenLoss:
    """Return -log pi: the loss of supervised steps, which uses neither behaviour nor advantages."""
    values = -inputs.logprobs
    return TokenLoss(values, {"nll": values.detach().sum()})


def clip_range(config: AlgorithmConfig, low: float, high: float) -> tuple[float, float]:
    """Return the configuration's `clip_low` and `clip_high`, with these defaults."""
    return low if config.clip_low is None else config.clip_low, high if config.clip_high is None else config.clip_high


def capped(weights: torch.Tensor, inputs: TokenInputs) -> torch.Tensor:
    """Return importance weights between the tokens' floors and caps. A weight that changes has its gradient changed."""
    if inputs.weight_cap is None:
        return weights
    factor = (inputs.weight_cap / weights.detach()).clamp(max=1.0)
    if inputs.weight_floor is not None:
        tiny = torch.finfo(weights.dtype).tiny
        factor = torch.maximum(factor, inputs.weight_floor / weights.detach().clamp(min=tiny))
    return weights * factor


def unlimited(values: torch.Tensor) -> torch.Tensor:
    """Return caps that limit nothing, one for each value."""
    return torch.full_like(values, torch.inf)


def log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Return log pi / mu, clamped to +-`MAX_LOG_RATIO`."""
    return (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return, for each token, the sum of the values over its sequence."""
    # There are at most as many sequences as tokens. Counting the sequences would wait for the device.
    return torch.zeros_like(values).index_add(0, sequences, values)[sequences]


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """Return, for each token, the mean of the values over the trained tokens of its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def sums_to_go(values: torch.Tensor, sequences: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
    """Return, for each token, the sum of the values from this token to the end of its sequence.

    Each later value counts `discount` times as much as the one before it.
    """
    # Each round doubles the number of values in a sum, so that a device has few operations to do.
    sums, factors = values.clone(), torch.zeros_like(values)
    factors[:-1] = discount * (sequences[1:] == sequences[:-1]).to(values.dtype)
    reach = 1
    while reach < len(values):
        ahead, their = sums[reach:].clone(), factors[reach:].clone()
        sums[:-reach] += factors[:-reach] * ahead
        factors[:-reach] *= their
        factors[-reach:] = 0.0
        reach *= 2
    return sums


def policy_sums(log_ratios: torch.Tensor, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the metrics of every policy loss: the ratio, and how many tokens the loss clips."""
    return ratio_sums(log_ratios) | {"clip_fraction": clipped.sum().to(log_ratios.dtype)}


def ratio_sums(log_ratios: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the ratio and two estimates of KL(mu || pi).

    `kl_k1` is -log r (unbiased, may be negative), `kl_k3` is r - 1 - log r (unbiased, never negative).
    """
    log_ratios = log_ratios.detach()
    return {
        "ratio": log_ratios.exp().sum(),
        "kl_k1": -log_ratios.sum(),
        "kl_k3": (torch.expm1(log_ratios) - log_ratios).sum(),
    }


# ---- corrections
#
# A correction looks only at the recorded ratio rho = sg(pi) / mu, at advantages and at sequences. Every loss already
# takes its importance ratio against the recorded mu, so a correction limits a token's weight or removes the token, and
# never multiplies by rho again. Clips and masks of the loss stay those of the recorded mu.


def tis(inputs: TokenInputs, *, cap: float) -> Corrected:
    """Truncated importance sampling: no token has a larger importance weight than `cap`."""
    caps = torch.full_like(inputs.behaviour, cap)
    return Corrected(caps, torch.ones_like(caps, dtype=torch.bool))


def sequence_tis(inputs: TokenInputs, *, low: float, high: float, ratio: Literal["product", "mean"]) -> Corrected:
    """Truncated importance sampling of sequences: every token has the weight of its sequence, within [low, high].

    The weight of a sequence is the product of its tokens' rho, or their geometric mean.
    """
    whole = _sequence_log_ratio(inputs, ratio).clamp(max=MAX_LOG_RATIO).exp()
    weights = whole.clamp(low, high)
    return Corrected(weights, torch.ones_like(weights, dtype=torch.bool), floor=weights, changed=whole != weights)


def icepop(inputs: TokenInputs, *, low: float, high: float) -> Corrected:
    """IcePop: a token counts only if low <= rho <= high."""
    ratio = log_ratio(inputs.logprobs, inputs.behaviour).exp()
    return Corrected(unlimited(inputs.behaviour), (ratio >= low) & (ratio <= high))


def mis(inputs: TokenInputs, *, low: float, high: float, ratio: Literal["product", "mean"]) -> Corrected:
    """Sequence masking: a sequence counts only if low <= its ratio <= high.

    The ratio of a sequence is the product of its tokens' rho, or their geometric mean, which does not grow with the
    length.
    """
    whole = _sequence_log_ratio(inputs, ratio)
    kept = whole <= math.log(high)
    return Corrected(unlimited(inputs.behaviour), kept & (whole >= math.log(low)) if low > 0 else kept)


def _sequence_log_ratio(inputs: TokenInputs, ratio: Literal["product", "mean"]) -> torch.Tensor:
    over = {"product": sequence_sums, "mean": sequence_means}[ratio]
    return over(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)


def opsm(inputs: TokenInputs, *, limit: float) -> Corrected:
    """Off-policy sequence masking: drop tokens with A < 0 if the sequence mean of log mu - log pi exceeds `limit`."""
    drift = -sequence_means(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)
    return Corrected(unlimited(inputs.behaviour), ~((inputs.advantages < 0) & (drift > limit)))
