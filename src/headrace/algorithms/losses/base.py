"""What a loss is: a pure function of flat arrays over trained tokens, blind to batches and weights.

A loss never normalises: the step multiplies it by the batch's weights and adds up. Its metrics are sums over tokens,
so those of micro-batches add up too. All tokens of a sequence come in one call, so a loss may look at whole sequences.

The smallest loss is a file with a `build`, named in the configuration by `loss = "my_loss.py:build"`:

    from headrace.algorithms.losses.base import TokenLoss

    def policy_gradient(inputs):
        return TokenLoss(-inputs.advantages * inputs.logprobs, {})

    def build(config):
        return policy_gradient

A loss that needs more than that declares it beside `build`, see `headrace.config.declared.LossFacts`:
`NEEDS = ("reference",)` asks for a field of `TokenInputs`, `READS = ("clip_high",)` names keys of [algorithm].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from headrace.config.schema import AlgorithmConfig
from headrace.errors import ConfigError
from headrace.reference import call_factory, import_function

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here: beyond it only overflow is to be had."""


class TokenInputs(NamedTuple):
    """What is known of N trained tokens; every array is [N]. The last four are there where a loss asks for them.

    Every policy's log-probabilities are at the sampling temperature, among the tokens that sampling kept.
    """

    logprobs: torch.Tensor
    """Log pi, differentiable: the policy in training."""
    behaviour: torch.Tensor
    """Log mu, as the engine recorded it when it sampled the token."""
    advantages: torch.Tensor
    sequences: torch.Tensor
    """int64: which sequence a token belongs to, numbered from 0 within the call; never a part of one."""
    lags: torch.Tensor
    """How many versions old the token is, in the dtype of `logprobs`."""
    proximal: torch.Tensor | None = None
    """Of the weights that the version in training began with."""
    reference: torch.Tensor | None = None
    """Of the weights before the first policy step; of a model with an adapter, of its base."""
    teacher: torch.Tensor | None = None
    """Of the model to learn from."""
    entropy: torch.Tensor | None = None
    """Of pi at the token's position, differentiable if there is a bonus on it."""


class TokenLoss(NamedTuple):
    """The losses of N trained tokens."""

    values: torch.Tensor
    """[N], differentiable with respect to the policy's log-probabilities."""
    sums: dict[str, torch.Tensor]
    """Metrics as detached sums over the N tokens: divide by the tokens of the step for means."""


class Loss(Protocol):
    """A loss function."""

    def __call__(self, inputs: TokenInputs, /) -> TokenLoss:
        """The loss of each token."""
        ...


class Corrected(NamedTuple):
    """What a correction makes of N tokens."""

    behaviour: torch.Tensor
    """[N], the log mu that the loss is to see: the recorded one, or a larger one, which bounds the ratio."""
    kept: torch.Tensor
    """[N], bool; the loss of the others is zero."""


class Correction(Protocol):
    """Tames tokens on which policy and sampler disagree, before any loss sees them."""

    def __call__(self, inputs: TokenInputs, /) -> Corrected:
        """Look at the recorded ratios; nothing here is differentiable."""
        ...


LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {}
"""Every policy loss by the name that `[algorithm] loss` gives it: the modules of `policy`."""

CORRECTIONS: dict[str, Callable[[AlgorithmConfig], Correction]] = {}
"""Every correction by the name that `[algorithm] corrections` gives it."""


ADDITIONS: list[Callable[[AlgorithmConfig, Loss], Loss]] = []
"""What may be added to any loss, whatever its corrections; each gives the loss back as it is where it is off."""


def given(field: torch.Tensor | None) -> torch.Tensor:
    """An optional field that the loss has declared among its `NEEDS`."""
    assert field is not None
    return field


def build_loss(config: AlgorithmConfig, correct_above: int | None = None) -> Loss:
    """The policy loss that the configuration names, with its corrections and what it adds to them.

    With `correct_above`, corrections touch only tokens of a larger lag.
    """
    loss = LOSSES[config.loss](config) if config.loss in LOSSES else _loss_of_user(config)
    corrections: dict[str, Correction] = {name: CORRECTIONS[name](config) for name in config.corrections}
    if corrections:
        loss = corrected(loss, corrections, above=correct_above)
    for extend in ADDITIONS:
        loss = extend(config, loss)
    return loss


def _loss_of_user(config: AlgorithmConfig) -> Loss:
    """What the `build` that `[algorithm] loss` refers to makes."""
    loss: Loss = call_factory(f"[algorithm] loss: {config.loss}", import_function(config.loss), config)
    if not callable(loss):
        raise ConfigError(f"[algorithm] loss: {config.loss} returned a {type(loss).__name__}, not a loss function")
    return loss


def corrected(loss: Loss, corrections: Mapping[str, Correction], above: int | None = None) -> Loss:
    """The loss with these corrections; each looks at what was recorded, so their order does not matter.

    A correction sees all tokens, whole sequences too; with `above`, its verdict counts for those of a larger lag only.

    Metrics of the ratio stay those of the recorded tokens; `<name>_fraction` counts what a correction touched.
    """

    def whole(inputs: TokenInputs) -> TokenLoss:
        behaviour, kept = inputs.behaviour, torch.ones_like(inputs.behaviour, dtype=torch.bool)
        exempt = torch.zeros_like(kept) if above is None else inputs.lags <= above
        fractions: dict[str, torch.Tensor] = {}
        for name, correct in corrections.items():
            verdict = correct(inputs._replace(logprobs=inputs.logprobs.detach()))
            verdict = Corrected(
                torch.where(exempt, inputs.behaviour, verdict.behaviour), torch.logical_or(exempt, verdict.kept)
            )
            touched = ~verdict.kept | (verdict.behaviour != inputs.behaviour)
            fractions[f"{name}_fraction"] = touched.sum().to(inputs.behaviour.dtype)
            behaviour = torch.maximum(behaviour, verdict.behaviour)
            kept = kept & verdict.kept
        result = loss(inputs._replace(behaviour=behaviour))
        values = torch.where(kept, result.values, 0.0)
        return TokenLoss(values, result.sums | ratio_sums(log_ratio(inputs.logprobs, inputs.behaviour)) | fractions)

    return whole


def log_ratio(logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Log pi / mu, cut to +-`MAX_LOG_RATIO`."""
    return (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token, the sum of the values over its sequence."""
    # There are at most as many sequences as tokens; counting them would wait for the device.
    return torch.zeros_like(values).index_add(0, sequences, values)[sequences]


def sequence_means(values: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
    """For each token, the mean of the values over the trained tokens of its sequence."""
    return sequence_sums(values, sequences) / sequence_sums(torch.ones_like(values), sequences)


def policy_sums(log_ratios: torch.Tensor, clipped: torch.Tensor) -> dict[str, torch.Tensor]:
    """The metrics of every policy loss: the ratio, and how many tokens the loss clips."""
    return ratio_sums(log_ratios) | {"clip_fraction": clipped.sum().to(log_ratios.dtype)}


def ratio_sums(log_ratios: torch.Tensor) -> dict[str, torch.Tensor]:
    """The ratio and two estimates of KL(mu || pi).

    `kl_k1` is -log r (unbiased, may be negative), `kl_k3` is r - 1 - log r (unbiased, never negative).
    """
    log_ratios = log_ratios.detach()
    return {
        "ratio": log_ratios.exp().sum(),
        "kl_k1": -log_ratios.sum(),
        "kl_k3": (torch.expm1(log_ratios) - log_ratios).sum(),
    }
