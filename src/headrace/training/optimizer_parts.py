"""The assignment of parameters to optimizers: every trainable parameter belongs to one group of one optimizer.

Weight decay applies to matrices. It does not apply to vectors (norms, biases), nor to the stacked vectors of experts.
`[training] learning_rates` multiplies the rate of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from headrace.config.schema import TrainingConfig
from headrace.errors import UserError
from headrace.training.muon import Muon

ADAMW_STATE = frozenset({"exp_avg", "exp_avg_sq", "step"})
_BLOCKWISE_STATE = frozenset({"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "step"})


@dataclass(frozen=True)
class OptimizerPart:
    """One optimizer, with a description of its state."""

    optimizer: torch.optim.Optimizer
    kinds: frozenset[str]
    """The names of the states that the optimizer keeps for a parameter."""
    numbers: frozenset[str] = frozenset()
    """The names of the states that are plain numbers, not tensors."""
    packs: bool = False
    """Whether the optimizer may keep a state as several tensors in one."""

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of every group to `rate` times the factor of the group."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate * group["factor"])
            else:
                group["lr"] = rate * group["factor"]


def make_parts(
    model: torch.nn.Module,
    named: Mapping[str, torch.nn.Parameter],
    config: TrainingConfig,
    wholes: Mapping[str, torch.nn.Parameter],
) -> list[OptimizerPart]:
    """Build the configured optimizers for a model's trainable parameters, or for this rank's parts of the parameters.

    `wholes` are the parameters themselves, by the same names.
    """
    factors = _factors(named, config.learning_rates)
    if config.optimizer != "muon":
        make = _adamw if config.optimizer == "adamw" else _adamw_8bit
        return [make(_groups(named, factors, config), config)] if named else []
    hidden = hidden_matrices(model)
    muon = partial(_muon, wholes={p: wholes[name] for name, p in named.items()})
    parts = []
    for mine, make in ((hidden, muon), (named.keys() - hidden, _adamw)):
        chosen = {name: p for name, p in named.items() if name in mine}
        if chosen:
            parts.append(make(_groups(chosen, factors, config), config))
    return parts


def hidden_matrices(model: torch.nn.Module) -> set[str]:
    """Return the names of trainable matrices, or stacks of them, except the embedding and the vocabulary projection."""
    outer = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        outer.add(id(head.weight))
    return {
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim <= 3 and is_matrix(name, p) and id(p) not in outer
    }


def is_matrix(name: str, p: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix or a stack of matrices. A stack of biases is not."""
    return p.ndim >= 2 and not name.endswith("bias")


def _factors(named: Mapping[str, torch.nn.Parameter], patterns: Mapping[str, float]) -> dict[str, float]:
    for pattern in patterns:
        if not any(pattern in name for name in named):
            raise UserError(f"[training] learning_rates: no trainable parameter has {pattern!r} in its name")
    return {name: next((patterns[pattern] for pattern in patterns if pattern in name), 1.0) for name in named}


def _groups(
    named: Mapping[str, torch.nn.Parameter], factors: Mapping[str, float], config: TrainingConfig
) -> list[dict[str, Any]]:
    groups: dict[tuple[bool, float], list[torch.nn.Parameter]] = {}
    for name, p in named.items():
        groups.setdefault((is_matrix(name, p), factors[name]), []).append(p)
    return [
        {"params": members, "weight_decay": config.weight_decay if decays else 0.0, "factor": factor}
        for (decays, factor), members in groups.items()
    ]


def _adamw(groups: list[dict[str, Any]], config: TrainingConfig) -> OptimizerPart:
    return OptimizerPart(torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True), ADAMW_STATE)


def _muon(
    groups: list[dict[str, Any]], config: TrainingConfig, wholes: Mapping[torch.Tensor, torch.Tensor]
) -> OptimizerPart:
    return OptimizerPart(Muon(groups, lr=0.0, wholes=wholes), frozenset({"momentum_buffer"}))


def _adamw_8bit(groups: list[dict[str, Any]], config: TrainingConfig) -> OptimizerPart:
    betas = (config.beta1, config.beta2)
    on_gpu = all(p.device.type == "cuda" for group in groups for p in group["params"])
    if on_gpu:
        try:
            from bitsandbytes.optim import AdamW8bit as Blockwise
        except ImportError:
            pass
        else:
            return OptimizerPart(Blockwise(groups, lr=0.0, betas=betas), _BLOCKWISE_STATE, frozenset({"step"}))
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise UserError(
            '[training] optimizer = "adamw_8bit" needs the package torchao, or bitsandbytes on a GPU '
            '(pip install torchao, or take optimizer = "adamw")'
        ) from error
    return OptimizerPart(AdamW8bit(groups, lr=0.0, betas=betas), ADAMW_STATE, packs=True)
