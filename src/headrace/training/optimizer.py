"""The optimizer step, the learning rate schedule, and the rule that a gradient that is not finite changes nothing.

The learning rate is a pure function of the step, and all optimizer state is kept in checkpoints, so a resumed run
continues exactly where it stopped. On a GPU, fused AdamW decides on the device whether a gradient is finite, so the
host does not wait.

Every trainable parameter belongs to one group of one optimizer. Weight decay applies to matrices. It does not apply to
vectors (norms, biases), nor to the stacked vectors of experts. `[training] learning_rates` multiplies the rate of a
group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from headrace.config.schema import TrainingConfig
from headrace.delivery.parts import held_region
from headrace.errors import UserError
from headrace.training.muon import Muon
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.sharding import copies, global_norm, local_part, local_tensor
from headrace.training.update_ratio import UpdateRatio

CLIP_EPSILON = 1e-6
"""The same value that torch uses when it clips gradients."""

Schedule = Literal["constant", "cosine", "linear"]
ADAMW_STATE = frozenset({"exp_avg", "exp_avg_sq", "step"})
_BLOCKWISE_STATE = frozenset({"state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2", "step"})


def learning_rate(step: int, *, peak: float, warmup_steps: int, schedule: Schedule, total_steps: int) -> float:
    """Return the learning rate of a step, counted from 1.

    The rate rises linearly and reaches the peak at step `warmup_steps`. Then, unless the schedule is constant, the rate
    falls so that the step after `total_steps` would have a rate of zero.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps - 1) / max(1, total_steps - warmup_steps))
    return peak * (0.5 * (1.0 + math.cos(math.pi * progress)) if schedule == "cosine" else 1.0 - progress)


class Applied(NamedTuple):
    """The result of a step."""

    norm: float
    """The norm of the gradient, before clipping."""
    finite: bool
    changed: bool
    """Whether the weights changed. They do not change without a gradient, nor if the gradient is not finite."""
    update_ratio: float
    """|change of the weights| / |weights|, see the module `update_ratio`."""


class Pending(NamedTuple):
    """A step that the device may not have finished."""

    norm: torch.Tensor
    ratio: torch.Tensor | None
    """The update ratio. None if no step was made."""

    def read(self) -> Applied:
        """Wait for the device and return the result of the step."""
        norm = float(self.norm)
        finite = math.isfinite(norm)
        changed = finite and self.ratio is not None
        return Applied(norm, finite, changed, float(self.ratio) if changed and self.ratio is not None else 0.0)


class Optimizer:
    """All optimizers of a model's trainable parameters, used as one and stepped with a given learning rate.

    For a sharded model the optimizer steps this rank's part, with this rank's part of the moments. Muon gathers whole
    matrices for that.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: TrainingConfig,
        ranks: Ranks | None = None,
        masters: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        """Build the optimizers.

        `masters` are the trainable parameters, where the model itself holds only copies of them.
        """
        self._ranks = ranks
        self._parameters = (
            dict(masters)
            if masters is not None
            else {name: p for name, p in model.named_parameters() if p.requires_grad}
        )
        self._named = {name: local_part(p) for name, p in self._parameters.items()}
        self._clip_norm = config.clip_norm
        self._parts = make_parts(model, self._named, config, self._parameters)
        self._part_of = {
            id(p): part for part in self._parts for group in part.optimizer.param_groups for p in group["params"]
        }

    def apply(self, rate: float) -> Applied:
        """Clip the gradients by their global norm, make a step, and drop the gradients.

        If the norm is not finite, weights and moments stay as they are.
        """
        return self.begin(rate).read()

    def begin(self, rate: float) -> Pending:
        """Start a step like `apply`. On a GPU the step is only enqueued."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = global_norm(gradients, self._ranks)
        self._take_gradients()
        ratio = None
        if gradients and (self._on_device or bool(torch.isfinite(norm))):
            if not self._on_device:
                torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._clip_norm, norm)
            before = self._watched()
            for part in self._parts:
                part.set_rate(rate)
                if self._on_device:
                    self._step_on_device(part.optimizer, norm)
                else:
                    part.optimizer.step()
            ratio = before.after()
        for p in (*self._named.values(), *self._parameters.values()):
            p.grad = None
        return Pending(norm, ratio)

    @property
    def _on_device(self) -> bool:
        """Whether the optimizers can skip a step on the device, without the host."""
        return self._ranks is None and all(
            isinstance(part.optimizer, torch.optim.AdamW)
            and all(p.device.type == "cuda" for group in part.optimizer.param_groups for p in group["params"])
            for part in self._parts
        )

    def _step_on_device(self, optimizer: Any, norm: torch.Tensor) -> None:
        # Fused AdamW has these two fields for loss scaling: it divides gradients by `grad_scale`, and skips the step if
        # `found_inf` is set.
        optimizer.grad_scale = ((norm + CLIP_EPSILON) / self._clip_norm).clamp(min=1.0).float()
        optimizer.found_inf = (~torch.isfinite(norm)).float()
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _watched(self) -> UpdateRatio:
        ranks = self._ranks
        if ranks is None:
            return UpdateRatio(self._named.values())
        return UpdateRatio(
            self._parameters.values(),
            lambda whole: held_region(whole).start,
            lambda whole: copies(whole, ranks),
            lambda values: values.new_tensor(ranks.sum_over_all(values.tolist())),
        )

    def _take_gradients(self) -> None:
        for name, whole in self._parameters.items():
            part = self._named[name]
            if part is not whole:
                part.grad = None if whole.grad is None else local_tensor(whole.grad)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the states of the optimizers for a checkpoint, as a flat dict by `kind/parameter name`.

        A state that consists of several tensors (8-bit codes and their scales) is kept as `kind.part/parameter name`.
        """
        found: dict[str, torch.Tensor] = {}
        for name, p in self._named.items():
            part = self._part_of[id(p)]
            state = part.optimizer.state.get(p, {})
            for kind in sorted(part.kinds & state.keys()):
                value = torch.tensor(state[kind]) if kind in part.numbers else state[kind]
                found |= {f"{kind}{piece}/{name}": tensor for piece, tensor in _pieces(value)}
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the states that `tensors` returned."""
        states: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            kind, _, piece = kind.partition(".")
            if name not in self._named or kind not in self._part_of[id(self._named[name])].kinds:
                raise UserError(f"the checkpoint's optimizer has {key}, which this model and optimizer have not")
            states.setdefault(name, {}).setdefault(kind, {})[piece] = tensor
        if any(part.packs for part in self._parts):
            self._prime(states.keys())
        for name, kinds in states.items():
            p = self._named[name]
            part = self._part_of[id(p)]
            for kind, pieces in kinds.items():
                _check_form(f"{kind} of {name}", pieces, part.optimizer.state[p].get(kind))
                part.optimizer.state[p][kind] = _restored(part, kind, pieces, part.optimizer.state[p].get(kind), p)

    def _prime(self, names: Iterable[str]) -> None:
        """Make the optimizers create their states, by a step of size zero that leaves the weights unchanged."""
        for name in names:
            self._named[name].grad = torch.zeros_like(self._named[name])
        for part in self._parts:
            part.set_rate(0.0)
            part.optimizer.step()
            part.optimizer.zero_grad(set_to_none=True)


def _pieces(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the plain tensors of a state: the state itself, or the tensors inside it."""
    if not hasattr(value, "__tensor_flatten__"):
        yield "", value
        return
    for name in value.__tensor_flatten__()[0]:
        yield f".{name}", getattr(value, name)


def _check_form(what: str, pieces: Mapping[str, torch.Tensor], present: Any) -> None:
    """Raise unless the checkpoint's state has the same parts. A state that does not exist yet counts as one tensor."""
    kept = {""} if present is None else {piece.removeprefix(".") for piece, _ in _pieces(present)}
    if pieces.keys() != kept:
        raise UserError(
            f"the checkpoint's optimizer has {what} in another form than this one: "
            "it is of a run with another [training] optimizer"
        )


def _restored(part: OptimizerPart, kind: str, pieces: Mapping[str, torch.Tensor], present: Any, p: torch.Tensor) -> Any:
    """Return a state built from the tensors of `_pieces`.

    `present` is the state that the optimizer already has, if any.
    """
    if kind in part.numbers:
        return pieces[""].item()
    if "" in pieces:
        # The optimizer decides where a state lives: on the host, if it put the state there; else with the parameter.
        device = p.device if present is None else present.device
        return pieces[""].to(device, copy=True)
    for name, tensor in pieces.items():
        getattr(present, name).copy_(tensor)
    return present


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
