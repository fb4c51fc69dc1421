"""An independent trainer with a critic: plain Hugging Face and torch, one sequence and one token at a time."""

from __future__ import annotations

from typing import Any

import torch
from reference_loop import policy_loss

from headrace.config.schema import AlgorithmConfig, TrainingConfig
from headrace.types import Batch


class PlainCritic:
    """A plain model with a value head of its own, which is trained on batches of rewards."""

    def __init__(self, model: Any, algorithm: AlgorithmConfig, training: TrainingConfig, reference: Any = None) -> None:
        self.model, self.algorithm, self.training, self.reference = model, algorithm, training, reference
        self.vector = torch.zeros(model.config.hidden_size, dtype=torch.float64, requires_grad=True)
        self.number = torch.zeros((), dtype=torch.float64, requires_grad=True)
        betas = training.beta1, training.beta2
        self.mine = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self.mine if p.ndim > 1]
        vectors = [p for p in self.mine if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=training.learning_rate,
            betas=betas,
        )
        rate = algorithm.critic_learning_rate
        self.own = torch.optim.AdamW([self.vector, self.number], lr=rate, betas=betas, weight_decay=0.0)

    def losses(self, batch: Batch, minibatch: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of the policy, and the mean error of the values."""
        policy = torch.zeros((), dtype=torch.float64)
        errors = []
        start = 0
        for number, length in enumerate(batch.lengths.tolist()):
            here = slice(start + 1, start + length)
            trained = torch.tensor(batch.trained[here])
            if minibatch is None or batch.minibatches[number] == minibatch:
                tokens = torch.tensor(batch.token_ids[start : start + length].astype("int64"))
                logp, hidden = self.read(self.model, tokens, batch.temperature)
                mu, rewards, weight, versions = (
                    torch.tensor(array[here])[trained].double()
                    for array in (batch.logprobs, batch.rewards, batch.weights, batch.versions)
                )
                if self.algorithm.reward_kl == "k1":
                    with torch.no_grad():
                        beside = self.read(self.reference, tokens, batch.temperature)[0][trained]
                    rewards = rewards - self.algorithm.reward_kl_weight * (mu - beside)
                values = hidden[trained] @ self.vector + self.number
                advantages = torch.tensor(self.gae(rewards.tolist(), values.tolist()), dtype=torch.float64)
                logp = logp[trained]
                rho = torch.exp(logp.detach() - mu)
                ratio = rho * torch.exp(logp - logp.detach())
                lag = batch.version - versions
                losses = policy_loss(rho, ratio, logp, advantages, lag, self.algorithm, {})
                policy = policy + (weight * losses).sum()
                errors.append(0.5 * (values - (values.detach() + advantages)) ** 2)
            start += length
        return policy, torch.cat(errors).mean()

    def gae(self, rewards: list[float], values: list[float]) -> list[float]:
        """By the definition: a decaying sum of surprises, for each token by itself."""
        gamma, decay = self.algorithm.discount, self.algorithm.gae_lambda
        after = [*values[1:], 0.0]
        surprises = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
        return [
            sum((gamma * decay) ** (j - i) * surprises[j] for j in range(i, len(surprises)))
            for i in range(len(surprises))
        ]

    @staticmethod
    def read(model: Any, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        out = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        logp = torch.log_softmax(out.logits[0, :-1] / temperature, dim=-1)
        return logp[torch.arange(len(logp)), tokens[1:]], out.hidden_states[-1][0, :-1]

    def step(self, batch: Batch) -> float:
        """Train a batch, and return the mean of its losses."""
        made = []
        minibatches = [None] if batch.minibatches is None else sorted(set(batch.minibatches.tolist()))
        for minibatch in minibatches * batch.epochs:
            policy, error = self.losses(batch, minibatch)
            weight = self.algorithm.value_weight
            found = torch.autograd.grad(policy + weight * error, self.mine, retain_graph=True)
            for p, g in zip(self.mine, found, strict=True):
                p.grad = g
            self.vector.grad, self.number.grad = torch.autograd.grad(error, [self.vector, self.number])
            torch.nn.utils.clip_grad_norm_(self.mine, self.training.clip_norm)
            self.optimizer.step()
            self.own.step()
            made.append(float((policy + weight * error).detach()))
        return sum(made) / len(made)
