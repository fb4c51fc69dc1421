"""The weights of a model that an adapter changes, found by the same few names for trainer and engines.

A target either names weights that trainer and engines compute in the same way, or is refused with a one-line error.
Nothing is left out silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.errors import ModelError
from headrace.models.rounding import FourBitLinear

ALL_LINEAR = "all-linear"
"""A target that means every linear layer except the vocabulary projection. Stacked experts, and routers with classes of
their own, do not count as linear layers here, although peft includes them for some families."""


@dataclass(frozen=True, eq=False)
class Stack:
    """The weights of all experts of a layer in one parameter."""

    weight: nn.Parameter  # [experts, out, in], or [experts, in, out] where transposed
    transposed: bool

    @property
    def oriented(self) -> torch.Tensor:
        """The weights as [experts, out, in], not copied."""
        weight = self.weight.detach()
        return weight.transpose(1, 2) if self.transposed else weight


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets that were found, by name, in the order of the model."""

    linears: dict[str, nn.Linear]
    stacks: dict[str, Stack]
    modules: dict[str, nn.Module]
    """The modules that are trained in full."""

    def shapes(self, rank: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """Return the shapes of A and B for every adapted weight.

        As in peft, the A of all experts of a stack are stored as one matrix, and so are the B.
        """
        found = {}
        for name, layer in self.linears.items():
            found[name] = ((rank, layer.in_features), (layer.out_features, rank))
        for name, stack in self.stacks.items():
            experts, outputs, inputs = stack.oriented.shape
            found[name] = ((rank * experts, inputs), (outputs, rank * experts))
        return found

    def full_weights(self) -> dict[str, torch.Tensor]:
        """Return the live parameters of the modules that are trained in full."""
        return {
            f"{name}.{inner}": parameter.detach()
            for name, module in self.modules.items()
            for inner, parameter in module.named_parameters()
        }


def find_targets(model: Any, targets: tuple[str, ...], modules: tuple[str, ...] = ()) -> Targets:
    """Find the weights that an adapter changes. Raises a one-line `ModelError` if that is not possible.

    A target is the end of a name: of linear layers (`q_proj`) or stacked experts (`experts.down_proj`). It may also be
    `ALL_LINEAR`. `modules` are ends of names of modules that are trained in full.
    """
    named = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    linears: set[str] = set()
    stacks: set[str] = set()
    for target in targets:
        stacked = [name for name, p in parameters.items() if "." in target and p.ndim == 3 and _ends(name, target)]
        found = [name for name in named if _matches(model, name, named[name], target)]
        if not stacked and not found:
            raise ModelError(f"LoRA target {target!r} is not in the model; {_known(named, parameters)}")
        stacks.update(stacked)
        linears.update(found)
    full = {name for module in modules for name in _full_modules(named, module)}
    result = Targets(
        linears={name: module for name, module in named.items() if name in linears - full},
        stacks={name: _stack(named, name, p) for name, p in parameters.items() if name in stacks},
        modules={name: module for name, module in named.items() if name in full},
    )
    _check(model, result)
    return result


def frozen_linears(model: Any, modules: tuple[str, ...] = ()) -> dict[str, nn.Linear]:
    """Return the linear layers that stay frozen beside an adapter, whether the adapter changes them or not.

    The vocabulary projection is left out, and so is everything inside `modules` (see `find_targets`).
    """
    named = dict(model.named_modules())
    full = {inner for module in modules for name in _full_modules(named, module) for inner in named[name].modules()}
    full.add(model.get_output_embeddings())
    return {name: module for name, module in named.items() if type(module) is nn.Linear and module not in full}


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _matches(model: Any, name: str, module: nn.Module, target: str) -> bool:
    if target == ALL_LINEAR:
        return _is_linear(module) and module is not model.get_output_embeddings()
    return _ends(name, target)


def _is_linear(module: nn.Module) -> bool:
    # Conv1D is linear too, and a trainer's "all-linear" would adapt it. It must be refused, not ignored.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _known(named: dict[str, nn.Module], parameters: dict[str, nn.Parameter]) -> str:
    linear = sorted(
        {name.rpartition(".")[2] for name, module in named.items() if type(module) in (nn.Linear, FourBitLinear)}
    )
    stacked = sorted({".".join(name.split(".")[-2:]) for name, p in parameters.items() if p.ndim == 3})
    return f"its linear layers are {', '.join(linear)}" + (f"; stacked experts {', '.join(stacked)}" if stacked else "")


def _full_modules(named: dict[str, nn.Module], target: str) -> list[str]:
    found = [name for name in named if name and _ends(name, target)]
    if not found:
        raise ModelError(f"module {target!r}, to be trained in full, is not in the model")
    for name in found:
        if not any(True for _ in named[name].parameters()):
            raise ModelError(f"module {name}, to be trained in full, has no parameters")
    return found


def _stack(named: dict[str, nn.Module], name: str, parameter: nn.Parameter) -> Stack:
    owner = named[name.rpartition(".")[0]]
    return Stack(parameter, bool(getattr(owner, "is_transposed", False)))


def _check(model: Any, found: Targets) -> None:
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)

    def alone(name: str, parameter: torch.Tensor, what: str) -> None:
        if shared := [held for held in holders[id(parameter)] if held != name]:
            owner = name.rpartition(".")[0]
            raise ModelError(f"{what} {owner} shares its weight with {shared[0]} and cannot be adapted on its own")

    for name, module in found.linears.items():
        kind = type(module)
        if kind not in (nn.Linear, FourBitLinear):
            where = f"{kind.__module__}.{kind.__name__}"
            raise ModelError(f"LoRA target {name} is a {where}; only nn.Linear can be adapted")
        if kind is nn.Linear:
            alone(f"{name}.weight", module.weight, "LoRA target")
    for name, full_module in found.modules.items():
        for inner, parameter in full_module.named_parameters():
            alone(f"{name}.{inner}", parameter, "module")
    for full in found.modules:
        if inside := [name for name in (*found.linears, *found.stacks) if name.startswith(f"{full}.")]:
            raise ModelError(f"LoRA target {inside[0]} is inside of {full}, which is trained in full")
