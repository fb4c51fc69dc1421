"""A LoRA adapter on a served model, merged into its weights or applied beside them; only the adapter is ever delivered.

Merged weights are always computed from the pristine ones, never from what the last adapter left: any series of swaps
ends where its last adapter alone would have led, and the zero adapter gives back the pristine weights bit for bit.
Parameters keep their addresses, and both modes know the adapter's tensors by the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from headrace.errors import ModelError, UserError

ALL_LINEAR = "all-linear"
"""As a target: every linear layer but the vocabulary projection. Stacked experts and routers of their own kind are not
linear layers here, though peft counts them in for some families."""
CHUNK = 1 << 24
"""Elements of a weight that are merged at once: bounds the float32 product that exists beside the weights (64 MiB)."""

# `base_layer` stays where an adapter wraps an adapter (peft on experts): without it two tensors would share a name.
_PEFT_PARTS = re.compile(r"^base_model\.model\.|(?<=\.lora_[AB])\.default(?=\.)|\.base_layer(?=\.)(?!\.lora_)")


@dataclass(frozen=True)
class LoraSpec:
    """Which layers an adapter changes, and how strongly. Targets are ends of module names ("q_proj"), or ALL_LINEAR."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"a LoRA adapter needs a rank of at least 1, not {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"a LoRA adapter needs a finite alpha above 0, not {self.alpha}")
        if not self.targets or not all(self.targets):
            raise UserError(f"a LoRA adapter needs targets, such as q_proj and v_proj, or {ALL_LINEAR}")

    @property
    def scaling(self) -> float:
        """What the product of the adapter's two matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class MergedAdapter:
    """Live weights W = W0 + scaling * B @ A: a step costs what it did, a swap passes over the targeted weights."""

    def __init__(self, model: Any, spec: LoraSpec, *, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        """The adapter's own tensors are float32 unless `dtype` says otherwise: they are read once a swap only."""
        generator = torch.Generator().manual_seed(seed)
        self._scaling = spec.scaling
        self._merges: list[_Merge] = []
        self._weights: dict[str, torch.Tensor] = {}
        for name, layer in _targeted(model, spec).items():
            live = layer.weight.detach()
            a, b = (x.to(live.device, dtype or torch.float32) for x in _initial(layer, spec.rank, generator))
            self._merges.append(_Merge(live, live.clone(), a, b))
            self._weights |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}

    def weights(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors by canonical name; write into them, then call `apply`."""
        return dict(self._weights)

    def apply(self) -> None:
        """Make the live weights those of the adapter as it is now. In place, and without waiting for the device."""
        with torch.no_grad():
            for merge in self._merges:
                merge.apply(self._scaling)


class UnmergedAdapter:
    """The base weights stay as they are and peft's layers add B(A(x)): the function that the trainer computes."""

    def __init__(self, model: Any, spec: LoraSpec, *, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        """The adapter's tensors have their layer's dtype unless `dtype` says otherwise: a wider one casts activations.

        Targeted modules are replaced, so attach before layers are compiled or graphs are captured.
        """
        from peft import LoraConfig, inject_adapter_in_model  # late: it takes seconds, and merging needs none of it

        generator = torch.Generator().manual_seed(seed)
        targeted = _targeted(model, spec)
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            use_rslora=spec.use_rslora,
            target_modules=[f"model.{name}" for name in targeted],
            inference_mode=True,
        )
        with torch.random.fork_rng(devices=[]):
            # Inside of a plain module: from the model's own config peft would infer more targets (a MoE's experts).
            inject_adapter_in_model(config, nn.ModuleDict({"model": model}))
        model.train(model.training)  # the new layers too
        self._weights: dict[str, torch.Tensor] = {}
        for name, base in targeted.items():
            layer = model.get_submodule(name)
            for side, first in zip(("lora_A", "lora_B"), _initial(base, spec.rank, generator), strict=True):
                part = getattr(layer, side)["default"].to(dtype)
                part.weight.detach().copy_(first)
                self._weights[f"{name}.{side}.weight"] = part.weight.detach()

    def weights(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors by canonical name; the next pass uses what is written into them."""
        return dict(self._weights)

    def apply(self) -> None:
        """Nothing: the layers read the adapter's tensors themselves."""


Adapter: TypeAlias = MergedAdapter | UnmergedAdapter


def attach(
    model: Any,
    spec: LoraSpec,
    mode: Literal["merged", "unmerged"],
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
) -> Adapter:
    """Give this model an adapter that changes nothing yet (B is zero; A depends on `seed` alone).

    Raises a one-line `ModelError` for a target that is missing, not an `nn.Linear`, or shares its weight.
    """
    if mode == "merged":
        return MergedAdapter(model, spec, seed=seed, dtype=dtype)
    return UnmergedAdapter(model, spec, seed=seed, dtype=dtype)


def canonical(peft_name: str) -> str:
    """The name of a weight of a peft model without what peft put into it: the same in the trainer and both modes."""
    return _PEFT_PARTS.sub("", peft_name)


@dataclass(frozen=True, eq=False)
class _Merge:
    """One targeted weight: where it lives, what it was, and the two matrices that change it."""

    live: torch.Tensor  # [out, in]
    pristine: torch.Tensor  # [out, in]
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]

    def apply(self, scaling: float) -> None:
        wide = torch.promote_types(self.live.dtype, torch.float32)
        # The product's sign is turned and turned back: 0 * -scaling is -0, which leaves a pristine -0 what it is.
        a, b = self.a.to(wide).neg(), self.b.to(wide)
        for rows in _row_chunks(*self.live.shape):
            torch.add(self.pristine[rows], b[rows] @ a, alpha=-scaling, out=self.live[rows])


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _initial(layer: nn.Linear, rank: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as peft begins with them, on the CPU in float32 so that no device or dtype changes the draw."""
    a = torch.empty(rank, layer.in_features, dtype=torch.float32)
    nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
    return a, torch.zeros(layer.out_features, rank, dtype=torch.float32)


def _targeted(model: Any, spec: LoraSpec) -> dict[str, nn.Linear]:
    """The layers that the spec names, in the model's order, each of a kind that both modes compute alike."""
    modules = dict(model.named_modules())
    names: set[str] = set()
    for target in spec.targets:
        found = [name for name in modules if _matches(model, name, modules[name], target)]
        if not found:
            linear = sorted({name.rpartition(".")[2] for name, m in modules.items() if type(m) is nn.Linear})
            raise ModelError(f"LoRA target {target!r} is not in the model; its linear layers are {', '.join(linear)}")
        names.update(found)
    targeted = {name: module for name, module in modules.items() if name in names}
    holders: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(name)
    for name, module in targeted.items():
        _check(name, module, holders)
    return targeted


def _matches(model: Any, name: str, module: nn.Module, target: str) -> bool:
    if target == ALL_LINEAR:
        return _is_linear(module) and module is not model.get_output_embeddings()
    return name == target or name.endswith(f".{target}")


def _is_linear(module: nn.Module) -> bool:
    # Conv1D is linear too, and a trainer's "all-linear" would adapt it: it must be refused, not passed over.
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _check(name: str, module: nn.Module, holders: dict[int, list[str]]) -> None:
    kind = type(module)
    if kind is not nn.Linear:
        raise ModelError(f"LoRA target {name} is a {kind.__module__}.{kind.__name__}; only nn.Linear can be adapted")
    if shared := [held for held in holders[id(module.weight)] if held != f"{name}.weight"]:
        raise ModelError(f"LoRA target {name} shares its weight with {shared[0]} and cannot be adapted on its own")
