"""An independent trainer in two hundred lines: plain Hugging Face and torch, one sequence at a time, no Headrace code.

It takes recorded batches and gives the losses that a right trainer must have had. It shares nothing, packs nothing and
knows the formulas by heart, or takes a loss that it does not know from `plain_losses`; what it reads of a batch are its
arrays.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.types import Batch
from plain_losses import DEFAULT_CLIPS, Tokens, plain_losses


def plain_model(path: str | Path, *, weights: str = "load", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a directory with Hugging Face's own eager attention."""
    if weights == "load":
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(path)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()


def sequence_logprobs(model: Any, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities of tokens 1..n of one sequence."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits / temperature, dim=-1)[torch.arange(len(token_ids) - 1), token_ids[1:]]


def token_readings(
    model: Any, token_ids: torch.Tensor, temperature: float, kept: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of tokens 1..n and the entropies there, each among the tokens kept for it, or among all."""
    logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1] / temperature
    if not any(kept):
        whole = torch.log_softmax(logits, dim=-1)
        return whole[torch.arange(len(whole)), token_ids[1:]], -(whole.exp() * whole).sum(dim=-1)
    chosen, spread = [], []
    for row, token, left in zip(logits, token_ids[1:].tolist(), kept[1:], strict=True):
        logp = torch.log_softmax(row[list(left)] if left else row, dim=-1)
        chosen.append(logp[left.index(token) if left else token])
        spread.append(-(logp.exp() * logp).sum())
    return torch.stack(chosen), torch.stack(spread)


def kept_lists(batch: Batch) -> list[list[int]]:
    if batch.kept is None:
        return [[] for _ in batch.token_ids]
    ids = iter(batch.kept.token_ids.tolist())
    return [[next(ids) for _ in range(count)] for count in batch.kept.counts.tolist()]


def token_loss(
    logp: torch.Tensor,
    mu: torch.Tensor,
    advantage: torch.Tensor,
    lag: torch.Tensor,
    objective: str,
    algorithm: AlgorithmConfig,
    others: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The losses of the trained tokens of one sequence."""
    if objective == "imitation":
        return -logp
    still = logp.detach()
    rho = torch.exp(still - mu)
    if algorithm.reward_kl != "none":
        d = mu - others["reference"]
        price = algorithm.reward_kl_weight * (d if algorithm.reward_kl == "k1" else torch.exp(-d) + d - 1)
        advantage = torch.stack([advantage[i] - price[i:].sum() for i in range(len(price))])
    kept = torch.ones(len(mu), dtype=torch.bool)
    if "icepop" in algorithm.corrections:
        kept &= (rho >= algorithm.icepop_low) & (rho <= algorithm.icepop_high)
    if "mis" in algorithm.corrections:
        kept &= bool(rho.prod() <= algorithm.mis_high)
    if "opsm" in algorithm.corrections:
        kept &= ~((advantage < 0) & ((mu - still).mean() > algorithm.opsm_limit))
    losses = policy_loss(rho, rho * torch.exp(logp - still), logp, advantage, lag, algorithm, others)
    if "tis" in algorithm.corrections:
        # What the gradient of a token has beside its advantage is its weight, which is limited.
        goal = others["teacher"] - still if algorithm.loss == "distillation" else advantage
        [slopes] = torch.autograd.grad(losses.sum(), logp, retain_graph=True)
        weights = torch.where(goal == 0, 0.0, (slopes / goal).abs())
        losses = losses * torch.where(weights > algorithm.tis_cap, algorithm.tis_cap / weights, 1.0)
    if "sequence_tis" in algorithm.corrections:
        whole = rho.prod() if algorithm.sequence_tis_ratio == "product" else rho.log().mean().exp()
        wanted = torch.clip(whole, algorithm.sequence_tis_low, algorithm.sequence_tis_high)
        goal = others["teacher"] - still if algorithm.loss == "distillation" else advantage
        [slopes] = torch.autograd.grad(losses.sum(), logp, retain_graph=True)
        losses = losses * torch.where(slopes == 0, 1.0, wanted * (goal / slopes).abs())
    return kept * losses


def added(logp: torch.Tensor, entropy: torch.Tensor, algorithm: AlgorithmConfig, others: Any) -> torch.Tensor:
    """What is added to the loss of each token."""
    total = torch.zeros_like(logp)
    if algorithm.kl != "none":
        d = logp - others["reference"]
        value = {"k1": d.detach() * logp, "k2": 0.5 * d**2, "k3": torch.exp(-d) + d - 1}[algorithm.kl]
        if algorithm.kl == "k1":
            value = value - (d * logp).detach() + d.detach()
        total = total + algorithm.kl_weight * value
    return total - (algorithm.entropy_weight or 0.0) * entropy


def policy_loss(
    rho: torch.Tensor,
    ratio: torch.Tensor,
    logp: torch.Tensor,
    advantage: torch.Tensor,
    lag: torch.Tensor,
    algorithm: AlgorithmConfig,
    others: dict[str, torch.Tensor],
) -> torch.Tensor:
    """`rho` and `ratio` are the same number; only the second is differentiable."""
    low, high = DEFAULT_CLIPS.get(algorithm.loss, (0.0, 0.0))
    low = low if algorithm.clip_low is None else algorithm.clip_low
    high = high if algorithm.clip_high is None else algorithm.clip_high

    def ppo(x: torch.Tensor) -> torch.Tensor:
        return -torch.min(x * advantage, torch.clip(x, 1 - low, 1 + high) * advantage)

    if algorithm.loss == "reinforce":
        return -advantage * logp
    if algorithm.loss == "cispo":
        return -torch.clip(rho, 0, 1 + high) * advantage * logp
    if algorithm.loss == "distillation":
        return -torch.clip(rho, 0, 1 + high) * (others["teacher"] - logp.detach()) * logp
    if algorithm.loss == "decoupled_ppo" and algorithm.proximal == "recomputed":
        begun = others["proximal"]
        return rho * torch.exp(begun - logp.detach()) * ppo(torch.exp(logp - begun))
    if algorithm.loss == "gspo":
        return ppo(rho.log().mean().exp() * ratio / rho)
    if algorithm.loss == "sapo":
        tau = 1.05 - 0.05 * (advantage > 0).to(advantage)
        return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    if algorithm.loss == "dppo_tv":
        moved = logp.detach().exp() * (1 - 1 / rho)
        return -ratio * advantage * ((moved * advantage.sign()) <= 0.2)
    if algorithm.loss == "topr":
        return -torch.where(advantage < 0, torch.clip(rho.prod(), max=1.0), 1.0) * advantage * logp
    if algorithm.loss == "decoupled_ppo":
        weight = rho ** torch.where(lag > 0, 1 - 1 / lag.clamp(min=1), 1.0)
        return weight * ppo(ratio / weight)
    if algorithm.loss in ("grpo", "dapo"):
        return ppo(ratio)
    # The ratio may be bounded by a correction, and the definition is to see that one.
    mu, beside = logp.detach() - rho.log(), (others.get("proximal"), others.get("teacher"))
    recorded = Tokens(mu, advantage, [0] * len(mu), lag.int().tolist(), *beside)
    return plain_losses(algorithm.loss, logp, logp.detach(), recorded, clips=(low, high))


def batch_loss(
    model: Any,
    batch: Batch,
    algorithm: AlgorithmConfig,
    others: dict[str, Any] | None = None,
    minibatch: int | None = None,
) -> torch.Tensor:
    """The loss of a batch or a minibatch, differentiable; `others` are models whose log-probabilities it looks at."""
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    start = 0
    kept = kept_lists(batch)
    for number, length in enumerate(batch.lengths.tolist()):
        here = slice(start + 1, start + length)
        trained = torch.tensor(batch.trained[here])
        if trained.any() and (minibatch is None or batch.minibatches[number] == minibatch):
            tokens = torch.tensor(batch.token_ids[start : start + length].astype("int64"))
            mine = kept[start : start + length]
            logp, entropy = (part[trained] for part in token_readings(model, tokens, batch.temperature, mine))
            with torch.no_grad():
                beside = {
                    name: token_readings(other, tokens, batch.temperature, mine)[0][trained]
                    for name, other in (others or {}).items()
                }
            mu, advantage, weight, version = (
                torch.tensor(array[here])[trained].to(logp)
                for array in (batch.logprobs, batch.advantages, batch.weights, batch.versions)
            )
            losses = token_loss(logp, mu, advantage, batch.version - version, batch.objective, algorithm, beside)
            if batch.objective == "policy":
                losses = losses + added(logp, entropy, algorithm, beside)
            total = total + (weight * losses).sum()
        start += length
    return total


def rate_of_step(step: int, training: TrainingConfig, total_steps: int) -> float:
    if step <= training.warmup_steps:
        return training.learning_rate * step / training.warmup_steps
    done = min(1.0, (step - 1 - training.warmup_steps) / max(1, total_steps - training.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return training.learning_rate * shape[training.schedule]


def reference_losses(
    model: Any,
    batches: Sequence[Batch],
    algorithm: AlgorithmConfig,
    training: TrainingConfig,
    *,
    total_steps: int,
    warm_start: WarmStartConfig | None = None,
    teacher: Any = None,
) -> list[float]:
    """Train a plain model on recorded batches, in place; the loss of every step, before its update (or their mean)."""
    others = {} if teacher is None else {"teacher": teacher}
    losses: list[float] = []
    objective = ""
    policy_steps = 0
    version: int | None = None
    bonus = algorithm.entropy_weight or 0.0
    for batch in batches:
        if batch.objective != objective:
            matrices = [p for p in model.parameters() if p.ndim > 1]
            vectors = [p for p in model.parameters() if p.ndim <= 1]
            optimizer = torch.optim.AdamW(
                [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
                betas=(training.beta1, training.beta2),
                weight_decay=training.weight_decay,
            )
            objective = batch.objective
        policy_steps += objective == "policy"
        imitating = objective == "imitation" and warm_start is not None
        rate = warm_start.learning_rate if imitating else rate_of_step(policy_steps, training, total_steps)
        if objective == "policy" and policy_steps == 1:
            others["reference"] = copy.deepcopy(model)
        if batch.version != version:
            others["proximal"], version = copy.deepcopy(model), batch.version
        minibatches = [None] if batch.minibatches is None else sorted(set(batch.minibatches.tolist()))
        made, spread = [], []
        if algorithm.entropy_target is not None:
            algorithm = msgspec.structs.replace(algorithm, entropy_weight=bonus)
        for minibatch in minibatches * batch.epochs:
            if algorithm.entropy_target is not None:
                spread.append(mean_entropy(model, batch, minibatch))
            loss = batch_loss(model, batch, algorithm, others if objective == "policy" else None, minibatch)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            made.append(float(loss.detach()))
        losses.append(sum(made) / len(made))
        if algorithm.entropy_target is not None and objective == "policy":
            lacking = algorithm.entropy_target - sum(spread) / len(spread)
            bonus = min(max(bonus + algorithm.entropy_rate * lacking, 0.0), 1.0)
    return losses


def mean_entropy(model: Any, batch: Batch, minibatch: int | None) -> float:
    """The mean entropy at the trained tokens of a batch or a minibatch."""
    found = []
    start = 0
    for number, length in enumerate(batch.lengths.tolist()):
        if minibatch is None or batch.minibatches[number] == minibatch:
            tokens = torch.tensor(batch.token_ids[start : start + length].astype("int64"))
            trained = torch.tensor(batch.trained[start + 1 : start + length])
            with torch.no_grad():
                found.append(token_readings(model, tokens, batch.temperature, [[]] * length)[1][trained])
        start += length
    return float(torch.cat(found).mean())
