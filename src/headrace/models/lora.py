"""A LoRA adapter on a served model, merged into its weights or applied beside them. Only the adapter is delivered.

Merged weights are always computed from the original weights, never from the result of the previous adapter. So a series
of swaps gives the same weights as its last adapter alone, and the zero adapter restores the original weights bit for
bit. Parameters keep their addresses, and both modes use the same names for the adapter's tensors.

Trainer and engines find the adapted weights by the same few names. A target either names weights that both compute in
the same way, or is refused with a one-line error. Nothing is left out silently.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from headrace.config.schema import LoraConfig
from headrace.errors import ModelError
from headrace.models.rounding import FourBitLinear

ALL_LINEAR = "all-linear"
"""A target that means every linear layer except the vocabulary projection. Stacked experts, and routers with classes of
their own, do not count as linear layers here, although peft includes them for some families."""


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets that were found, by name, in the order of the model."""

    linears: dict[str, nn.Linear]
    stacks: dict[str, torch.Tensor]
    """The live weights of all experts of a layer, [experts, out, in]."""
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
            experts, outputs, inputs = stack.shape
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


def check_shareable(model: Any, config: LoraConfig) -> None:
    """Raise a one-line `ModelError` if engines would write to the base under this adapter."""
    if stacks := find_targets(model, tuple(config.targets)).stacks:
        raise ModelError(
            f"[lora] share_base: {next(iter(stacks))} is a stack of experts, whose adapter is merged into the base;"
            " leave experts out of targets"
        )


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
    if target != ALL_LINEAR:
        return _ends(name, target)
    # Conv1D is linear too, and a trainer's "all-linear" would adapt it. It must be refused, not ignored.
    linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return linear and module is not model.get_output_embeddings()


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


def _stack(named: dict[str, nn.Module], name: str, parameter: nn.Parameter) -> torch.Tensor:
    owner = named[name.rpartition(".")[0]]
    weight = parameter.detach()
    return weight.transpose(1, 2) if getattr(owner, "is_transposed", False) else weight


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


CHUNK = 1 << 24
"""How many elements of a weight are merged at once. This bounds the float32 product beside the weights (64 MiB)."""

_PEFT_PLACE = re.compile(r"^base_model\.model\.|\.base_layer(?=\.|$)")
_ADAPTER = "default"


class Adapter:
    """An adapter on a served model: merged into the live weights, or beside them.

    Merged, a weight is W = W0 + scaling * B @ A. A decode step costs the same as without an adapter, and a swap passes
    over the targeted weights. Unmerged, peft's layers add B(A(x)) to unchanged linear layers, which is the function
    that the trainer computes. Stacked experts are merged in both modes, because peft would add their product to the
    weights again in every pass.
    """

    def __init__(self, model: Any, config: LoraConfig, mode: Literal["merged", "unmerged"]) -> None:
        """Give this model an adapter that changes nothing yet: all its matrices are zero.

        The adapter's tensors are float32 where they are merged, because only swaps read them, and of their layer's
        dtype where they are not. An unmerged adapter replaces the targeted modules, so add it before
        layers are compiled or graphs captured. Raises `ModelError` for a target that does not fit, see `find_targets`.
        """
        targets = find_targets(model, tuple(config.targets), tuple(config.modules))
        self._scaling = config.scaling
        self._weights = targets.full_weights()
        self._merges: list[_Merge] = []
        live = dict(targets.stacks)
        if mode == "merged":
            live |= {name: layer.weight.detach() for name, layer in targets.linears.items()}
        elif targets.linears:
            _inject(model, config, targets)
        for name, shapes in targets.shapes(config.rank).items():
            if name in live:
                a, b = (torch.zeros(shape, dtype=torch.float32, device=live[name].device) for shape in shapes)
                self._merges.append(_Merge(live[name], live[name].clone(), a, b))
            else:
                wrapped = model.get_submodule(name)
                a, b = (getattr(wrapped, side)[_ADAPTER].weight.detach().zero_() for side in ("lora_A", "lora_B"))
            self._weights |= _named(name, a, b)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by canonical name. Write into them, then call `apply`."""
        return dict(self._weights)

    def apply(self) -> None:
        """Compute the merged weights from the current adapter, in place and without waiting for the device.

        Layers beside an unmerged adapter read the adapter's tensors directly.
        """
        with torch.no_grad():
            for merge in self._merges:
                merge.apply(self._scaling)


def _inject(model: Any, config: LoraConfig, targets: Targets) -> None:
    """Replace the targeted linear layers by peft's layers."""
    # The import is late: it takes seconds, and merging does not need it.
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=[f"model.{name}" for name in targets.linears],
        inference_mode=True,
    )
    with torch.random.fork_rng(devices=[]):
        # The wrapper is a plain module: from the model's own config, peft would infer more targets (a MoE's experts).
        inject_adapter_in_model(settings, nn.ModuleDict({"model": model}))
    model.train(model.training)  # sets the mode of the new layers too


def adapter_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of peft's adapter in this model, and of modules trained in full, by canonical name.

    An engine's adapter has the same names in both of its modes.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        name = _PEFT_PLACE.sub("", path)
        if parameter := getattr(module, "parameter_name", None):  # of stacked experts, which peft nests
            name = f"{name}.{parameter}"
        a, b = (getattr(module, side, None) for side in ("lora_A", "lora_B"))
        if isinstance(a, nn.ModuleDict) and isinstance(b, nn.ModuleDict) and _ADAPTER in a:
            found |= _named(name, a[_ADAPTER].weight.detach(), b[_ADAPTER].weight.detach())  # type: ignore[operator]
        full = getattr(module, "modules_to_save", None)
        if isinstance(full, nn.ModuleDict) and _ADAPTER in full:
            found |= {f"{name}.{inner}": p.detach() for inner, p in full[_ADAPTER].named_parameters()}
    return found


@dataclass(frozen=True, eq=False)
class _Merge:
    """One targeted weight, or a stack of experts: the live tensor, its original values, and what changes it."""

    live: torch.Tensor  # [out, in], or [experts, out, in]
    pristine: torch.Tensor
    a: torch.Tensor  # [rank, in], or [experts * rank, in]
    b: torch.Tensor  # [out, rank], or [out, rank * experts]

    def apply(self, scaling: float) -> None:
        wide = torch.promote_types(self.live.dtype, torch.float32)
        # The sign of the product is flipped twice: 0 * -scaling is -0, and adding -0 keeps an original -0 as it is.
        a, b = self.a.to(wide).neg(), self.b.to(wide)
        stacked = self.live.ndim == 3
        if stacked:
            experts, rows, columns = self.live.shape
            # In peft's A the expert index comes before the rank; in B it comes after the rank.
            a, b = a.view(experts, -1, columns), b.view(rows, -1, experts).permute(2, 0, 1)
        step = max(1, CHUNK // self.live[0].numel())
        for start in range(0, len(self.live), step):
            part = slice(start, start + step)
            product = b[part] @ (a[part] if stacked else a)
            torch.add(self.pristine[part], product, alpha=-scaling, out=self.live[part])


def _named(name: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
