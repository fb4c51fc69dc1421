"""A LoRA adapter on a served model, merged into its weights or applied beside them. Only the adapter is delivered.

Merged weights are always computed from the original weights, never from the result of the previous adapter. So a series
of swaps gives the same weights as its last adapter alone, and the zero adapter restores the original weights bit for
bit. Parameters keep their addresses, and both modes use the same names for the adapter's tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from headrace.errors import UserError
from headrace.models.lora_targets import ALL_LINEAR as ALL_LINEAR
from headrace.models.lora_targets import Targets, find_targets

CHUNK = 1 << 24
"""How many elements of a weight are merged at once. This bounds the float32 product beside the weights (64 MiB)."""

# `base_layer` stays where an adapter wraps an adapter (peft on experts). Without it two tensors would have the same
# name.
_PEFT_PARTS = re.compile(r"^base_model\.model\.|(?<=\.lora_[AB])\.default(?=\.)|\.base_layer(?=\.)(?!\.lora_)")
_PEFT_PLACE = re.compile(r"^base_model\.model\.|\.base_layer(?=\.|$)")
_ADAPTER = "default"


@dataclass(frozen=True)
class LoraSpec:
    """The weights that an adapter changes, and how strongly. `find_targets` explains targets and modules."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    use_rslora: bool = False
    modules: tuple[str, ...] = ()
    """The modules that are trained in full beside the adapter, and delivered with it."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError(f"a LoRA adapter needs a rank of at least 1, not {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise UserError(f"a LoRA adapter needs a finite alpha above 0, not {self.alpha}")
        if not self.targets or not all(self.targets):
            raise UserError(f"a LoRA adapter needs targets, such as q_proj and v_proj, or {ALL_LINEAR}")

    @property
    def scaling(self) -> float:
        """The factor of the product of the adapter's two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class MergedAdapter:
    """An adapter merged into the live weights: W = W0 + scaling * B @ A.

    A decode step costs the same as without an adapter; a swap passes over the targeted weights.
    """

    def __init__(self, model: Any, spec: LoraSpec, *, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        """Merge an adapter. Its own tensors are float32 unless `dtype` says otherwise, because only swaps read them."""
        generator = torch.Generator().manual_seed(seed)
        self._scaling = spec.scaling
        targets = find_targets(model, spec.targets, spec.modules)
        live = {name: layer.weight.detach() for name, layer in targets.linears.items()}
        first = _initial(targets, spec.rank, generator)
        self._merges: list[_Merge | _StackMerge] = []
        self._weights = targets.full_weights()
        for name, weight in live.items():
            a, b = (x.to(weight.device, dtype or torch.float32) for x in first[name])
            self._merges.append(_Merge(weight, weight.clone(), a, b))
            self._weights |= _named(name, a, b)
        self._merges += _stack_merges(targets, first, dtype or torch.float32, self._weights)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by canonical name. Write into them, then call `apply`."""
        return dict(self._weights)

    def apply(self) -> None:
        """Compute the live weights from the current adapter, in place and without waiting for the device."""
        with torch.no_grad():
            for merge in self._merges:
                merge.apply(self._scaling)


class UnmergedAdapter:
    """An adapter beside unchanged linear layers: peft's layers add B(A(x)). The trainer computes the same function.

    Stacked experts are merged here too. peft would add their product to the weights again in every pass.
    """

    def __init__(self, model: Any, spec: LoraSpec, *, seed: int = 0, dtype: torch.dtype | None = None) -> None:
        """Add the adapter. Its tensors have their layer's dtype, unless `dtype` is given.

        A wider dtype casts activations. Targeted modules are replaced, so attach the adapter before layers are compiled
        or graphs are captured.
        """
        from peft import LoraConfig, inject_adapter_in_model  # late: it takes seconds, and merging does not need it

        generator = torch.Generator().manual_seed(seed)
        targets = find_targets(model, spec.targets, spec.modules)
        first = _initial(targets, spec.rank, generator)
        self._scaling = spec.scaling
        self._weights = targets.full_weights()
        self._merges = _stack_merges(targets, first, dtype or torch.float32, self._weights)
        if not targets.linears:
            return
        config = LoraConfig(
            r=spec.rank,
            lora_alpha=spec.alpha,
            use_rslora=spec.use_rslora,
            target_modules=[f"model.{name}" for name in targets.linears],
            inference_mode=True,
        )
        with torch.random.fork_rng(devices=[]):
            # The wrapper is a plain module: from the model's own config, peft would infer more targets (a MoE's
            # experts).
            inject_adapter_in_model(config, nn.ModuleDict({"model": model}))
        model.train(model.training)  # sets the mode of the new layers too
        for name in targets.linears:
            layer = model.get_submodule(name)
            parts = [getattr(layer, side)["default"].to(dtype).weight.detach() for side in ("lora_A", "lora_B")]
            for part, drawn in zip(parts, first[name], strict=True):
                part.copy_(drawn)
            self._weights |= _named(name, *parts)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the adapter's tensors by canonical name. Write into them, then call `apply`."""
        return dict(self._weights)

    def apply(self) -> None:
        """Merge the experts' part. The linear layers read the adapter's tensors directly."""
        with torch.no_grad():
            for merge in self._merges:
                merge.apply(self._scaling)


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

    Raises a one-line `ModelError` for a target that is missing, is not an `nn.Linear`, or shares its weight.
    """
    if mode == "merged":
        return MergedAdapter(model, spec, seed=seed, dtype=dtype)
    return UnmergedAdapter(model, spec, seed=seed, dtype=dtype)


def canonical(peft_name: str) -> str:
    """Return the name of a weight without the parts that peft adds.

    The name is the same in the trainer and in both modes.
    """
    return _PEFT_PARTS.sub("", peft_name)


def adapter_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of peft's adapter in this model, and of modules trained in full, by canonical name.

    Both modes use the same names. The tensors of an expert stack are named by their parameter, not by peft's nesting.
    """
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        name = _PEFT_PLACE.sub("", path)
        if parameter := getattr(module, "parameter_name", None):
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
    """One targeted weight: the live tensor, its original values, and the two matrices that change it."""

    live: torch.Tensor  # [out, in]
    pristine: torch.Tensor  # [out, in]
    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [out, rank]

    def apply(self, scaling: float) -> None:
        wide = torch.promote_types(self.live.dtype, torch.float32)
        # The sign of the product is flipped twice: 0 * -scaling is -0, and adding -0 keeps an original -0 as it is.
        a, b = self.a.to(wide).neg(), self.b.to(wide)
        for rows in _row_chunks(*self.live.shape):
            torch.add(self.pristine[rows], b[rows] @ a, alpha=-scaling, out=self.live[rows])


@dataclass(frozen=True, eq=False)
class _StackMerge:
    """The stacked experts of a layer, merged all at once like `_Merge`."""

    live: torch.Tensor  # [experts, out, in]
    pristine: torch.Tensor  # [experts, out, in]
    a: torch.Tensor  # [experts * rank, in]
    b: torch.Tensor  # [out, rank * experts]

    def apply(self, scaling: float) -> None:
        experts, rows, columns = self.live.shape
        wide = torch.promote_types(self.live.dtype, torch.float32)
        # In peft's A the expert index comes before the rank; in B it comes after the rank.
        a = self.a.to(wide).neg().view(experts, -1, columns)
        b = self.b.to(wide).view(rows, -1, experts).permute(2, 0, 1)
        step = max(1, CHUNK // (rows * columns))
        for start in range(0, experts, step):
            part = slice(start, start + step)
            torch.add(self.pristine[part], torch.bmm(b[part], a[part]), alpha=-scaling, out=self.live[part])


def _row_chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        yield slice(start, start + step)


_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


def _initial(targets: Targets, rank: int, generator: torch.Generator) -> dict[str, _Pair]:
    """Return A and B as peft initialises them.

    They are drawn on the CPU in float32, so that device and dtype do not change the draw.
    """
    drawn = {}
    for name, (a_shape, b_shape) in targets.shapes(rank).items():
        a = torch.empty(a_shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        drawn[name] = (a, torch.zeros(b_shape, dtype=torch.float32))
    return drawn


def _stack_merges(
    targets: Targets, first: Mapping[str, _Pair], dtype: torch.dtype, weights: dict[str, torch.Tensor]
) -> list[_StackMerge]:
    """Return the merges of the stacked experts. The tensors of their adapters are added to `weights`."""
    merges = []
    for name, stack in targets.stacks.items():
        live = stack.oriented
        a, b = (x.to(live.device, dtype) for x in first[name])
        merges.append(_StackMerge(live, live.clone(), a, b))
        weights |= _named(name, a, b)
    return merges


def _named(name: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
