"""An adapter becomes whole weights: its product is added to the pristine ones, which the model's directory holds.

They are never taken from what the last adapter left, so any series of swaps ends where its last adapter alone would
have led. An adapter of other weights than these is refused by their digest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from headrace.delivery.digest import MASK, digest
from headrace.errors import DeliveryError

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Pristine:
    """The weights in a model's directory, under their own names, in the dtype that they are served in."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, tied: bool = False) -> None:
        """`tied`: the vocabulary projection is the embedding, whatever the files hold."""
        self.weights: dict[str, torch.Tensor] = {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise DeliveryError(f"{directory} holds no safetensors to add an adapter to")
        for file in files:
            with safe_open(file, framework="pt") as opened:  # Mapped, not read: what is never looked at costs nothing.
                for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                    self.weights[name] = opened.get_tensor(name).to(dtype)
        if tied:
            self.weights.pop("lm_head.weight", None)
        self._digest: int | None = None

    def digest(self) -> int:
        """Of all of them; the trainer's of its base model must be the same."""
        if self._digest is None:
            self._digest = sum(digest([pair]) for pair in self.weights.items()) & MASK
        return self._digest

    def with_adapter(self, adapter: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
        """All weights, with those that the adapter changes: W + scaling * B @ A, or as they are where trained whole."""
        found = dict(self.weights)
        for name, tensor in adapter.items():
            target = name.removesuffix(_A).removesuffix(_B) + ".weight" if name.endswith((_A, _B)) else name
            if target not in self.weights:
                raise DeliveryError(f"the adapter changes {target}, which this server's model does not have")
            pristine = self.weights[target]
            if name.endswith(_A):
                a, b = tensor, adapter[name.removesuffix(_A) + _B]
                product = b.to(torch.float32) @ a.to(torch.float32)
                found[target] = torch.add(pristine.to(torch.float32), product, alpha=scaling).to(pristine.dtype)
            elif not name.endswith(_B):
                found[target] = tensor.to(pristine.dtype)
        return found
