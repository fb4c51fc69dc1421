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
from typing import Literal, NamedTuple

import torch

from headrace.config.schema import AlgorithmConfig
from headrace.errors import ConfigError
from headrace.reference import call_factory, import_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped at this value, because larger ones only lead to overflow."""


class TokenInputs(NamedTuple):
    """The inputs of a loss for N trained tokens; every array is [N]. The last four are present if a loss asks for them.

    The log-probabilities of every policy are at the sampling temperature, and over the tokens that sampling kept.
    """

    logprobs: torch.Tensor
    """Log pi, differentiable: the log-probabilities of the policy in training."""
    behaviour: torch.Tensor
    """Log mu: the log-probability that the engine recorded when it sampled the token."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """int64: the sequence that a token belongs to, numbered from 0 within the call. A call always has whole
    sequences."""
    lags: torch.Tensor
    """How many versions old the token is, in the dtype of `logprobs`."""
    weight_cap: torch.Tensor | None = None
    """The largest importance weight that the token may have in the gradient; see `capped`. None without a limit."""
    proximal: torch.Tensor | None = None
    """The log-probabilities under the weights with which the version in training began."""
    reference: torch.Tensor | None = None
    """The log-probabilities under the weights before the first policy step; for a model with an adapter, under its
    base."""
    teacher: torch.Tensor | None = None
    """The log-probabilities under the teacher, the model to learn from."""
    entropy: torch.Tensor | None = None
    """The entropy of pi at the token's position, differentiable if the loss has an entropy bonus."""


class TokenLoss(NamedTuple):
    """The losses of N trained tokens."""

    values: torch.Tensor
    """The loss of each token, [N], differentiable with respect to the policy's log-probabilities."""
    sums: dict[str, torch.Tensor]
    """Metrics as detached sums over the N tokens. Divide by the number of tokens of the step to get means."""


Loss = Callable[[TokenInputs], TokenLoss]
"""A loss function, which returns the loss of each token."""


class Corrected(NamedTuple):
    """The result of a correction for N tokens."""

    cap: torch.Tensor
    """[N], the largest importance weight that a token may have. Infinite without a limit."""
    kept: torch.Tensor
    """[N], bool: whether a token is kept. The loss of the other tokens is zero."""


Correction = Callable[[TokenInputs], Corrected]
"""A rule for tokens on which policy and sampler disagree. It goes by recorded ratios and is not differentiable."""

LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {}
"""Every policy loss by its name in `[algorithm] loss`. The losses are the modules of `policy`."""

CORRECTIONS: dict[str, Callable[[AlgorithmConfig], Correction]] = {
    "tis": lambda config: partial(tis, cap=config.tis_cap),
    "icepop": lambda config: partial(icepop, low=config.icepop_low, high=config.icepop_high),
    "mis": lambda config: partial(mis, low=config.mis_low, high=config.mis_high, ratio=config.mis_ratio),
    "opsm": lambda config: partial(opsm, limit=config.opsm_limit),
}
"""Every correction by its name in `[algorithm] corrections`."""

READS = {
    "tis": ("tis_cap",),
    "icepop": ("icepop_low", "icepop_high"),
    "mis": ("mis_ratio", "mis_low", "mis_high"),
    "opsm": ("opsm_limit",),
}
"""The keys of [algorithm] that only this correction reads, by correction."""
GOES_BY_REWARDS = ("opsm",)
CAPS_WEIGHTS = ("tis",)


def given(field: torch.Tensor | None) -> torch.Tensor:
    """Return an optional field, which the loss must have declared among its `NEEDS`."""
    assert field is not None
    return field


def build_loss(config: AlgorithmConfig, correct_above: int | None = None) -> Loss:
    """Build the configured loss. With `correct_above`, corrections change only tokens with a larger lag."""
    if config.loss in LOSSES:
        loss = LOSSES[config.loss](config)
    else:
        loss = call_factory(f"[algorithm] loss: {config.loss}", import_function(config.loss), config)
        if not callable(loss):
            raise ConfigError(f"[algorithm] loss: {config.loss} returned a {type(loss).__name__}, not a loss function")
    if config.corrections:
        loss = corrected(loss, {name: CORRECTIONS[name](config) for name in config.corrections}, above=correct_above)
    if config.entropy_weight is not None:
        loss = with_entropy(loss, config.entropy_weight)
    if config.kl != "none":
        loss = held_to_reference(loss, config.kl, config.kl_weight)
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
        exempt = torch.zeros_like(kept) if above is None else inputs.lags <= above
        fractions: dict[str, torch.Tensor] = {}
        for name, correct in corrections.items():
            verdict = correct(recorded)
            touched = ~exempt & (~verdict.kept | (ratio > verdict.cap))
            fractions[f"{name}_fraction"] = touched.sum().to(ratio.dtype)
            cap = torch.where(exempt, cap, torch.minimum(cap, verdict.cap))
            kept = kept & (exempt | verdict.kept)
        result = loss(inputs._replace(weight_cap=cap))
        return result._replace(values=torch.where(kept, result.values, 0.0), sums=result.sums | fractions)

    return whole


def with_entropy(loss: Loss, weight: float) -> Loss:
    """Return the loss minus weight x entropy at every trained token. With weight 0 the entropy is only measured."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result, entropy = loss(inputs), given(inputs.entropy)
        values = result.values - weight * entropy if weight else result.values
        return TokenLoss(values, result.sums | {"entropy": entropy.detach().sum()})

    return whole


def held_to_reference(loss: Loss, estimator: Literal["k1", "k2", "k3"], weight: float) -> Loss:
    """Return the loss plus weight x divergence at every trained token, also at tokens that corrections leave out."""

    def whole(inputs: TokenInputs) -> TokenLoss:
        result = loss(inputs)
        kl = divergence(inputs.logprobs, given(inputs.reference), estimator)
        return TokenLoss(result.values + weight * kl, result.sums | {"reference_kl": kl.detach().sum()})

    return whole


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
    """Return importance weights lowered to the tokens' caps. A weight over its cap has its gradient lowered alike."""
    if inputs.weight_cap is None:
        return weights
    return weights * (inputs.weight_cap / weights.detach()).clamp(max=1.0)


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


def icepop(inputs: TokenInputs, *, low: float, high: float) -> Corrected:
    """IcePop: a token counts only if low <= rho <= high."""
    ratio = log_ratio(inputs.logprobs, inputs.behaviour).exp()
    return Corrected(unlimited(inputs.behaviour), (ratio >= low) & (ratio <= high))


def mis(inputs: TokenInputs, *, low: float, high: float, ratio: Literal["product", "mean"]) -> Corrected:
    """Sequence masking: a sequence counts only if low <= its ratio <= high.

    The ratio of a sequence is the product of its tokens' rho, or their geometric mean, which does not grow with the
    length.
    """
    over = {"product": sequence_sums, "mean": sequence_means}[ratio]
    whole = over(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)
    kept = whole <= math.log(high)
    return Corrected(unlimited(inputs.behaviour), kept & (whole >= math.log(low)) if low > 0 else kept)


def opsm(inputs: TokenInputs, *, limit: float) -> Corrected:
    """Off-policy sequence masking: drop tokens with A < 0 if the sequence mean of log mu - log pi exceeds `limit`."""
    drift = -sequence_means(log_ratio(inputs.logprobs, inputs.behaviour), inputs.sequences)
    return Corrected(unlimited(inputs.behaviour), ~((inputs.advantages < 0) & (drift > limit)))
