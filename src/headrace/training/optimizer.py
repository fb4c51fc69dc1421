"""AdamW, its schedule, and the rule that a gradient which is not finite changes nothing.

The learning rate is a pure function of the step, so that a resumed run goes on exactly where it stood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch

from headrace.config.schema import TrainingConfig
from headrace.errors import UserError

Schedule = Literal["constant", "cosine", "linear"]
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def learning_rate(step: int, *, peak: float, warmup_steps: int, schedule: Schedule, total_steps: int) -> float:
    """The learning rate of a step, counted from 1.

    It rises linearly and reaches the peak with step `warmup_steps`; then it falls (unless constant) such that the step
    after `total_steps` would have zero.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps - 1) / max(1, total_steps - warmup_steps))
    return peak * (0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress)


class Optimizer:
    """AdamW over a model's parameters, stepped with a given learning rate. Vectors (norms, biases) do not decay."""

    def __init__(self, model: torch.nn.Module, config: TrainingConfig) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._clip_norm = config.clip_norm
        parameters = self._named.values()
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), fused=True)

    def apply(self, rate: float) -> tuple[float, bool]:
        """Clip the gradients by their global norm, step and drop them: (norm before clipping, did the weights change?).

        A norm that is not finite leaves weights and moments as they are.
        """
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        finite = bool(torch.isfinite(norm))
        if finite and gradients:
            torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._clip_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = rate
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return float(norm), finite and bool(gradients)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments and step counts, flat by `kind/parameter name`: what a checkpoint keeps."""
        state = self._adamw.state
        return {f"{kind}/{name}": state[p][kind] for name, p in self._named.items() if p in state for kind in _MOMENTS}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `tensors` gave."""
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            if name not in self._named or kind not in _MOMENTS:
                raise UserError(f"the checkpoint's optimizer has {key}, which this model has not")
            self._adamw.state[self._named[name]][kind] = tensor.clone()
