"""The critic: a value head on the trunk of the policy, with an optimizer of its own.

Every rank holds the whole head, which is one vector and one number, and all ranks make the same steps with it. Tensor
ranks need nothing of their own for this, because the states that the head reads, and their gradients, are whole on each
of them.

The head is no part of the model: it is never published, and checkpoints keep it in a file beside the optimizer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from headrace.algorithms.losses.base import TokenInputs, divergence, given
from headrace.algorithms.losses.critic import gae
from headrace.config.schema import AlgorithmConfig, TrainingConfig
from headrace.errors import UserError
from headrace.training.devices import input_device
from headrace.training.ranks import Ranks

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""The states of AdamW."""


class Judgement(NamedTuple):
    """What the critic says of N trained tokens."""

    advantages: torch.Tensor
    """[N], without a gradient."""
    losses: torch.Tensor
    """The error of the critic at each token, (value - target)^2 / 2, differentiable."""
    sums: dict[str, torch.Tensor]
    """Metrics as detached sums over the N tokens."""


class Critic:
    """A linear value head, which begins at zero, and its AdamW."""

    def __init__(
        self, model: Any, algorithm: AlgorithmConfig, training: TrainingConfig, ranks: Ranks | None = None
    ) -> None:
        dtype = torch.promote_types(model.get_input_embeddings().weight.dtype, torch.float32)
        size = model.config.get_text_config().hidden_size
        self._algorithm = algorithm
        self._ranks = ranks
        self._head = torch.nn.Linear(size, 1, device=input_device(model), dtype=dtype)
        for parameter in self._head.parameters():
            torch.nn.init.zeros_(parameter)
        self._optimizer = torch.optim.AdamW(
            self._head.parameters(),
            lr=algorithm.critic_learning_rate,
            betas=(training.beta1, training.beta2),
            weight_decay=0.0,
        )

    @property
    def trunk_weight(self) -> float:
        """The weight of the critic's error in the loss of the policy's own weights."""
        return self._algorithm.value_weight

    def judge(self, hidden: torch.Tensor, inputs: TokenInputs, rewards: torch.Tensor) -> Judgement:
        """Return the advantages of tokens that earned these rewards, and how far the critic was off.

        `hidden` are the states before the tokens, [N, hidden size]. The gradient of the error reaches the head as it
        is, and the policy's own weights multiplied by `trunk_weight`. With `[algorithm] reward_kl`, rewards also pay
        for the divergence from the reference.
        """
        still = hidden.detach()
        if self.trunk_weight:
            still = still + self.trunk_weight * (hidden - still)
        values = self._head(still.to(self._head.weight.dtype))[:, 0].to(rewards.dtype)
        sums = {}
        if self._algorithm.reward_kl != "none":
            paid = divergence(inputs.behaviour, given(inputs.reference), self._algorithm.reward_kl).detach()
            rewards = rewards - self._algorithm.reward_kl_weight * paid
            sums["reward_kl"] = paid.sum()
        found = gae(
            rewards,
            values,
            inputs.sequences,
            discount=self._algorithm.discount,
            decay=self._algorithm.gae_lambda,
        )
        losses = (values - found.targets).square() / 2
        sums |= {"value": values.detach().sum(), "value_loss": losses.detach().sum()}
        return Judgement(found.advantages, losses, sums)

    def step(self, *, changed: bool) -> None:
        """Update the head by the gradients of all ranks, if the policy was updated, and drop the gradients."""
        parameters = list(self._head.parameters())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._ranks is not None:
                self._ranks.add_over_data(parameter.grad)
        if changed:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return copies of the head and of its moments for a checkpoint, on the host."""
        found = {}
        for name, parameter in self._head.named_parameters():
            found[name] = parameter.detach()
            found |= {f"{kind}/{name}": state for kind, state in self._optimizer.state.get(parameter, {}).items()}
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, parameter in self._head.named_parameters():
            if name not in saved or saved[name].shape != parameter.shape:
                raise UserError("[algorithm] critic: the value head of the checkpoint is of another model")
            parameter.copy_(saved[name])
            states = {kind: saved[f"{kind}/{name}"] for kind in MOMENTS if f"{kind}/{name}" in saved}
            self._optimizer.state[parameter] = {
                kind: tensor.clone() if kind == "step" else tensor.to(parameter, copy=True)
                for kind, tensor in states.items()
            }
